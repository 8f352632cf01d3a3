"""Choose a precision and round weights to it."""
