"""Parts of `combined.py`: step times, acceptance, and the simulated rollout."""
