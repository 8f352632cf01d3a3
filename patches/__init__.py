"""Patch families, one folder each. The import name is ``flashpatch.patches``."""

if __name__ != "flashpatch.patches":
    raise ImportError(f"{__name__!r} is a folder of FlashPatch's sources: import it as 'flashpatch.patches'")
