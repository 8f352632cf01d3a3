"""Prove by behaviour that the patches of family eagle are live."""
