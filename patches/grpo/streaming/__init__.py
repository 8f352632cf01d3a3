"""Train on groups as they end: verl's trainer mode ``stream_async``."""
