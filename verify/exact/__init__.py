"""Find where an engine computes other numbers than the trainer's model, and name the first module that does."""
