"""Make rows of a ledger by hand, for tests of what is judged from them."""

from collections.abc import Mapping

from flashpatch.ledger.runs import Row
from flashpatch.record import Patch


def entry(state: str, calls: int = 0, detail: str = "") -> Mapping:
    return {"state": state, "detail": detail, "calls": calls, "target": "toy.core:f", "tested": True}


def row(
    *roles: str, pid: int = 10, ppid: int = 1, host: str = "far", start="7", error=None, patches=None, **notes
) -> Row:
    patches = patches or {}
    return Row(
        host, pid, start, ppid, "python", roles, {}, {}, patches, notes, error, "now", first=ppid == 1 or None
    )


def patch(id: str, evidence: str, *scope: str, **more) -> Patch:
    """A record that is about evidence alone."""
    framework, _, name = id.partition(".")[2].partition(".")
    texts = dict.fromkeys(("why", "how", "remove_when"), "")
    fields = dict(targets=(f"{framework}.core:{name}",), requires=framework, wrapper=print, evidence=evidence)
    return Patch(id, **{**fields, **texts, "scope": frozenset(scope), **more})
