"""Read the settings of a research fork and write the same as FlashPatch's configuration.

A family that stands for a fork names a module in `flashpatch.record.Family.migrations`; it has ``HELP``, one
line, and ``migrate(given, plan)``. `given.Given` holds what the user's files say, `plan.Plan` takes what becomes
of it. Scripts are read, never run.
"""
