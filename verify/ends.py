"""Say how each process of a job ended, and with that the job."""

from __future__ import annotations

from collections.abc import Sequence

from flashpatch.ledger.runs import Row

RUNNING, RETURNED, INTERRUPTED, KILLED, LOST = "running", "returned", "interrupted", "killed", "lost"


def of_process(row: Row) -> str:
    """Return how a process ended, in one of the words above or in its own: an exception, a status other than 0.

    ``killed`` is one that is gone and said nothing: a signal, a crash, ``os._exit``. ``lost``: nobody knows whether it runs.
    Empty if it is gone, and its FlashPatch did not write ends yet."""
    if row.ended or row.alive:
        return row.ended or RUNNING
    return "" if row.ended is None else KILLED if row.alive is False else LOST


def first(rows: Sequence[Row]) -> list[Row]:
    """Return the processes that the job was started as, the last time that it was: they have no parent in it and are no actor of
    Ray, which others end, and no rank of an engine, nor without a role and a call, if others are neither."""
    pids = {(row.host, row.pid) for row in rows}
    found = [row for row in rows if not row.title and (row.host, row.ppid) not in pids]
    ranks = [row for row in found if {"engine-core", "worker"} & {*row.roles} and "driver" not in row.roles]
    found = [row for row in found if row not in ranks] if len(ranks) < len(found) else found
    # Ray's own servers carry patches too, and do nothing
    found = [row for row in found if row.roles or any(one["calls"] for one in row.parts[0].values())] or found
    last = max(found, key=lambda row: row.first_written, default=None)
    return [row for row in found if last and (row.host, row.ppid) == (last.host, last.ppid)]


def of_job(rows: Sequence[Row]) -> str:
    """Return how the job ended, or ``running``: of what its first processes say, the first of these that one does, else what is
    worst. Empty if no row tells."""
    started = first(rows)
    found = [of_process(row) for row in started]
    if RUNNING in found or (not started and any(row.alive for row in rows)):
        return RUNNING
    bad = [end for end in found if end not in (RETURNED, INTERRUPTED, LOST, "")]
    return next((end for end in (*bad, LOST, INTERRUPTED, RETURNED) if end in found), "")
