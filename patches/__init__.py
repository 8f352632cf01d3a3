"""Patch families, one folder each. The import name is ``flashpatch.patches``."""

if __name__ != "flashpatch.patches":
    raise ImportError(f"{__name__!r} is a folder of FlashPatch's sources: import it as 'flashpatch.patches'")

ORDER = ("cpu", "fp8", "grpo", "fsdp", "eagle", "flowrl")
"""The order in which families are armed, however they were typed. Of two that wrap one function the later is outermost."""
