"""Code that several patch families use; not a family."""
