"""Capture the target's hidden states during rollouts and queue them for drafter training."""
