"""What a probe hands back: one observation, and whether it is the one that a live patch gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proof:
    """One observed behaviour of a patch, by id, or of a family, by name.

    A probe, ``probe(nonce: str, workdir: Path) -> list[Proof]``, starts the framework in processes of its own and observes
    their output. While it runs, the environment carries the family's settings, a private ledger, and ``nonce`` as the run id:
    rows found under it were written by processes of that probe.

    ``what`` is the behaviour looked for, such as ``"update equals a fresh engine"``, ``ok`` whether it was observed,
    ``evidence`` what was observed, in a few words or numbers, and ``seconds`` how long it took."""

    subject: str
    what: str
    ok: bool
    evidence: str
    seconds: float = 0.0
