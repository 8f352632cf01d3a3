"""Check contracts against a framework's source, and find which version is installed."""
