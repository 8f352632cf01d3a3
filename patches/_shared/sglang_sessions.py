"""Name begin and end of an update session in SGLang 0.5.12's own request for tensors, which has no field for them.

The field ``load_format`` of a request without tensors says what it means. Sender and scheduler both use this module.
The patch that answers these requests tells the observers of other families, such as the audit's."""

from __future__ import annotations

from typing import Any, Protocol

_BEGIN, END = "flashpatch:begin:", "flashpatch:end"

OPEN = " (flashpatch: the update waits for more)"
"""Ends the answer to a bucket after which the update is still open."""


class Observer(Protocol):
    """Follow the sessions of a scheduler process."""

    def begin(self, sync: str) -> None:
        """A session is open; ``sync`` as in `begin`."""

    def end(self) -> str:
        """Return why the session must not be committed, on whichever rank, or an empty string. Every rank calls this."""


observers: list[Observer] = []


def begin(sync: str) -> dict[str, Any]:
    """Return the fields of the request that opens a session; ``sync`` is the sender's id of it, or empty."""
    return _request(f"{_BEGIN}{sync}")


def end() -> dict[str, Any]:
    """Return the fields of the request that ends it."""
    return _request(END)


def sync_of(load_format: str | None) -> str | None:
    """Return the sender's id of the session that a request opens; None if it opens none."""
    opens = bool(load_format) and load_format.startswith(_BEGIN)
    return load_format.removeprefix(_BEGIN) if opens else None


def _request(meaning: str) -> dict[str, Any]:
    return dict(serialized_named_tensors=[], load_format=meaning, flush_cache=False, disable_draft_model=True)
