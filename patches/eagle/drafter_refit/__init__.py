"""Load new drafter weights, and record them; knows no framework."""
