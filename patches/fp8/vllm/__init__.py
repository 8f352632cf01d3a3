"""Adapt precision and refit to vLLM."""
