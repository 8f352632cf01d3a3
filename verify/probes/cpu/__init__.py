"""Prove by behaviour that the patches of family cpu are live."""
