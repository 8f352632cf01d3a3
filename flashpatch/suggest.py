"""Suggest known names for an unknown one."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """``Did you mean 'fp8'? Known: bf16, fp8.``"""
    names = sorted(known)
    close = closest(name, names)
    hint = f"Did you mean {close!r}? " if close else ""
    return f"{hint}Known: {', '.join(names) or 'none'}."


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is spelt most like ``name``; empty if none is."""
    import difflib

    return next(iter(difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.5)), "")
