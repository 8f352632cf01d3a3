"""Estimate whether 8-bit rollout is faster, from a model's shapes and matrix products timed on this machine."""
