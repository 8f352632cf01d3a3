"""Proof, by behaviour, that a patch is live. The import name is ``flashpatch.verify``."""

if __name__ != "flashpatch.verify":
    raise ImportError(f"{__name__!r} is a folder of FlashPatch's sources: import it as 'flashpatch.verify'")
