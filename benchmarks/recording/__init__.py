"""Engines whose decode steps `record_trace.py` times under fixed arms."""
