"""Compute the GRPO loss and per-token log-probabilities."""
