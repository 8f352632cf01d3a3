"""Will 8-bit rollout pay? Answered from a model's shapes and matrix products timed on this machine."""
