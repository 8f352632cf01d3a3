"""Resolve what is switched on: names and options from ``enable()``, the environment and the config file."""
