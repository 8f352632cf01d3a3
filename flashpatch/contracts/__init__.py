"""Contracts: whether an installed framework is what a patch was written for."""
