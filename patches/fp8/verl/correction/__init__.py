"""Measure and correct the mismatch between rollout and trainer."""
