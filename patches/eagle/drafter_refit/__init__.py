"""Judge drafter weight updates; knows no framework."""
