"""Route rollout requests by outstanding tokens."""
