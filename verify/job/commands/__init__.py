"""Subcommands of `flashpatch` about one job."""
