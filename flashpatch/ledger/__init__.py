"""Write and read the ledger: one row per process, with what it is and which patches are live in it.

The functions are those of `flashpatch.ledger.row`, which is loaded when one of them is first used."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flashpatch.ledger import row

    boot, ending, event, expect, flush = row.boot, row.ending, row.event, row.expect, row.flush
    note, notes, opens_engine, problem = row.note, row.notes, row.opens_engine, row.problem
    read, role, sample, touch = row.read, row.role, row.sample, row.touch

__all__ = ["boot", "ending", "event", "expect", "flush", "note", "notes"]
__all__ += ["opens_engine", "problem", "read", "role", "sample", "touch"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashpatch.ledger import row

    return getattr(row, name)
