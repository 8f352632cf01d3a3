"""Prove by behaviour that the patches of family grpo are live."""
