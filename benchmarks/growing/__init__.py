"""Parts of growth.py: each function times one thing at one size."""
