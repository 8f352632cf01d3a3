"""Behaviour probes, one folder per patch family."""
