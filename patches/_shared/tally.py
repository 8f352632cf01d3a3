"""Count occurrences among the notes of this process's row, where other processes of the job can read them."""

from __future__ import annotations

from flashpatch import ledger


def count(name: str) -> None:
    """Add one to the note ``name``, which begins at 1."""
    ledger.note(**{name: ledger.notes().get(name, 0) + 1})
