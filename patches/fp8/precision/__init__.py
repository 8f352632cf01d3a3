"""Arithmetic of 8-bit formats in plain torch; knows of no engine."""
