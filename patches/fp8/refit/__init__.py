"""Update the weights of a model as a transaction; knows no framework."""
