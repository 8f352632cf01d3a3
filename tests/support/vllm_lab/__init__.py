"""A laboratory for real vLLM engines on tiny random models: see README.md beside this file."""
