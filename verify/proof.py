"""What a probe hands back: one observation, and whether it is the one that a live patch gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """One observed behaviour.

    A probe, ``probe(nonce: str, workdir: Path) -> list[Proof]``, starts the framework in processes of its
    own and observes their output. While it runs, the environment carries the family's settings, a private
    ledger, and ``nonce`` as the run id: rows found under it were written by processes of that probe.

    Attributes:
        subject: id of the patch, or name of the family, that this is about.
        what: the behaviour looked for, e.g. ``"update equals a fresh engine"``.
        ok: whether it was observed.
        evidence: what was observed, in a few words or numbers.
        seconds: how long it took.
    """

    subject: str
    what: str
    ok: bool
    evidence: str
    seconds: float = 0.0
