"""The gap between the policy of rollouts and the trainer's, whichever trainer measures it."""
