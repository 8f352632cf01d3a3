"""Processes that `felt.py` starts, each with one engine, and what they count with."""
