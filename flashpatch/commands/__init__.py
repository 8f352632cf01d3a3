"""The subcommands of ``flashpatch``, one module each; `flashpatch.cli` says what such a module holds."""
