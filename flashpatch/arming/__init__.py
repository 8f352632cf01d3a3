"""Arm patches in this process: import hooks, call counters, replaced attributes, refusals."""
