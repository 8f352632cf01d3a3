"""Share code between patch families; not a family itself."""
