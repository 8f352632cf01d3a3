"""Prove by behaviour that the patches of family fp8 are live."""
