"""Prove by behaviour that the patches of family flowrl are live."""
