"""Write and read the ledger: one row per process, with what it is and which patches are live in it."""

from flashpatch.ledger.row import boot, expect, flush, nonce, note, notes, problem, read, role, touch

__all__ = ["boot", "expect", "flush", "nonce", "note", "notes", "problem", "read", "role", "touch"]
