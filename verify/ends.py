"""Say how each process of a job ended, and with that the job."""

from __future__ import annotations

from collections.abc import Sequence

from flashpatch.ledger.runs import Row
from flashpatch.verify.job.lanes import ended as heard

RUNNING, RETURNED, INTERRUPTED, LOST = "running", "returned", "interrupted", "lost"
SILENT = "ended without a word"


def is_over(end: str) -> bool:
    """Whether a process or job that ended so is known to have ended."""
    return end not in (RUNNING, LOST, "")


def of_process(row: Row) -> str:
    """Return how a process ended: as it said itself, an exception or a status other than 0 in its own words, else as who stopped it said.

    `SILENT` is one that is gone: a signal, a crash, no memory. ``lost``: nobody knows whether it runs. Empty if it is gone, and its
    FlashPatch did not write ends yet."""
    if row.ended or row.alive:
        return row.ended or RUNNING
    return row.stopped or ("" if row.ended is None else SILENT if row.alive is False else LOST)


def first(rows: Sequence[Row]) -> list[Row]:
    """Return the processes where the run began, the last time that it did: not those that were gone before."""
    begun = [row for row in rows if row.first]
    last = max((row.first_written for row in begun), default=0.0)
    return [row for row in begun if row.alive or heard(row, ()) >= int(last)]


def of_job(rows: Sequence[Row]) -> str:
    """Return how the job ended, or ``running``: of what its first processes say, the first of these that one does, else what is
    worst; ``lost`` if it began in a process that carries no FlashPatch. Empty if no row tells."""
    started = first(rows)
    found = [of_process(row) for row in started]
    if RUNNING in found or (not started and any(row.alive for row in rows)):
        return RUNNING
    found += [LOST for row in rows if not started and row.first is False]
    bad = [end for end in found if end not in (RETURNED, INTERRUPTED, LOST, "")]
    return next((end for end in (*bad, LOST, INTERRUPTED, RETURNED) if end in found), "")
