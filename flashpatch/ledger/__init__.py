"""Write and read the ledger: one row per process, with what it is and which patches are live in it.

The functions are those of `flashpatch.ledger.row`, which is loaded when one of them is first used.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flashpatch.ledger.row import boot as boot
    from flashpatch.ledger.row import event as event
    from flashpatch.ledger.row import expect as expect
    from flashpatch.ledger.row import flush as flush
    from flashpatch.ledger.row import nonce as nonce
    from flashpatch.ledger.row import note as note
    from flashpatch.ledger.row import notes as notes
    from flashpatch.ledger.row import problem as problem
    from flashpatch.ledger.row import read as read
    from flashpatch.ledger.row import role as role
    from flashpatch.ledger.row import sample as sample
    from flashpatch.ledger.row import touch as touch

__all__ = [
    "boot",
    "event",
    "expect",
    "flush",
    "nonce",
    "note",
    "notes",
    "problem",
    "read",
    "role",
    "sample",
    "touch",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashpatch.ledger import row

    return getattr(row, name)
