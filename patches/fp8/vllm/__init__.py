"""The family on vLLM."""
