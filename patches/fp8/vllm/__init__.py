"""Patches and adapters for vLLM."""
