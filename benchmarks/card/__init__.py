"""What `make test-gpu` measures by the clock: a row in each process."""
