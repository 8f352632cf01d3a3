"""Update the weights of a model in place, as a transaction; depends on no framework."""
