"""Replay the experts that the rollout's engine chose in the actor's routers."""
