"""Carry kept tokens through verl: from the server through agent loops and the transfer queue to the FSDP actor."""
