"""Count occurrences among the notes of this process's row, where other processes of the job can read them."""

from __future__ import annotations

from flashpatch import ledger


def count(name: str, more: int = 1) -> None:
    """Add ``more`` to the note ``name``, which begins at 0."""
    ledger.note(**{name: ledger.notes().get(name, 0) + more})
