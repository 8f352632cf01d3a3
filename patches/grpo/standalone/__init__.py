"""Collect parts of async-grpo for use without verl; no patch calls them."""
