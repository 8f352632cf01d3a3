"""Send weights from verl's trainer to its rollout workers without silent hangs."""
