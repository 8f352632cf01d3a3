"""Prove by behaviour that the patches of family fsdp are live."""
