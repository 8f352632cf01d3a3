"""What became of each update: the error it raised, the policy it left, its event in the ledger."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import timed
from flashpatch.patches._shared.tally import count

if TYPE_CHECKING:
    from flashpatch.patches.fp8.update.model import ManagedModel


PATCH = "fp8.update"
REQUESTS_RUN = "requests are running"
BUSY = (
    f"{REQUESTS_RUN}, so the update is refused",
    "Let them end or abort them first; on vLLM the option in_flight can be abort, recompute or keep.",
)
REPORT = "Report this model; until then update it by restarting the engine."

ASLEEP = (
    "the engine sleeps and the memory of its weights is away",
    'Call wake_up(tags=["weights"]) first (on SGLang resume_memory_occupation).',
)
"""Problem and advice of the error that every write gets until the memory is back."""


def update_error(problem: str, advice: str, model: str | None = None) -> PatchError:
    """Return a `PatchError` of this patch; ``model``: class name of the model whose update failed."""
    return PatchError(problem, patch=PATCH, target=model, advice=advice)


@dataclass
class Policy:
    """Which version of the policy a model holds.

    Attributes:
        role: of the model in its engine, ``target`` or ``drafter``.
        state: ``loading``, ``ready``, ``open`` or ``broken``, see `managed_model`.
        version: number of the last committed update, 0 before the first.
        missing: names that an open update still waits for, as `listed` gives them.
        error: why the weights are broken, or what came may be of several updates; empty otherwise.
        holds: of LoRA adapters, number to name and path; None if another number has taken its place in caches."""

    role: str
    state: str
    version: int
    missing: str = ""
    error: str = ""
    holds: dict[int | str, tuple[str, str] | None] = field(default_factory=dict)

    def why_refused(self) -> str:
        """Return one sentence, without its full stop, for a policy that may not generate: what failed first goes first."""
        said = [self.error.rstrip(".")] if self.error else []
        if self.missing:
            said.append(f"an update is incomplete, {self.missing} did not come")
        return "; since then ".join(said) or f"its state is {self.state!r}"


def listed(names: list[str], separator: str = ", ", most: int = 6) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


class UpdateEvents:
    """Time the updates of one model.

    Every update that was opened becomes one event ``update`` with ``outcome``: ``committed`` (with ``version``),
    ``abandoned`` (with ``problem``), or ``replaced`` by one that was begun before its end. ``seconds`` is the time from
    opening to outcome; of it ``load_seconds`` was spent loading ``buckets``, ``commit_seconds`` committing, and the
    rest waiting for the sender. ``rss_bytes`` is the process's resident memory then. An update that could not be
    opened is an event ``refused``. The note ``updates_refused`` counts both it and the abandoned ones.

    Args:
        role: ``target`` or ``drafter``."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._opened: float | None = None
        self._load = self._commit = 0.0
        self._buckets = 0

    def opened(self) -> None:
        """Note that an update begins."""
        if self._opened is not None:
            self._ended("replaced")
        self._opened, self._load, self._commit, self._buckets = time.perf_counter(), 0.0, 0.0, 0

    def loading(self) -> AbstractContextManager[None]:
        """Count a bucket, and time it."""
        self._buckets += 1
        return timed(self, "_load")

    def committing(self) -> AbstractContextManager[None]:
        """Time the commit."""
        return timed(self, "_commit")

    def committed(self, version: int) -> None:
        """Record that the update is the policy now."""
        self._ended("committed", version=version)
        if self._role == "target":
            count("updates")
        _note(self._role, version, "ready")

    def abandoned(self, error: BaseException, state: str) -> None:
        """Record that the update failed, and the model's state afterwards."""
        problem = error.problem if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"
        self._ended("abandoned", problem=problem, state=state)
        count("updates_refused")

    def closed(self) -> None:
        """Note that the update ended without a tensor, which is no event."""
        self._opened = None

    def refused(self, problem: str) -> None:
        """Record that no update could be opened."""
        ledger.event("refused", what="weight update", role=self._role, problem=problem)
        count("updates_refused")

    def _ended(self, outcome: str, **facts: object) -> None:
        now = time.perf_counter()
        opened, self._opened = self._opened, None
        ledger.event(
            "update",
            outcome=outcome,
            role=self._role,
            seconds=round(now - (now if opened is None else opened), 6),
            load_seconds=round(self._load, 6),
            commit_seconds=round(self._commit, 6),
            buckets=self._buckets,
            rss_bytes=_resident_bytes(),
            **facts,
        )


def note(managed: ManagedModel) -> None:
    """Write a model's version and state to the ledger, a drafter's under names of its own."""
    _note(managed.adapter.role, managed.version, managed.state)


def _note(role: str, version: int, state: str) -> None:
    if role == "drafter":
        return ledger.note(drafter_version=version, drafter_state=state)
    if ledger.notes().get("policy_version") != version:
        ledger.note(policy_since=round(time.time(), 3))
    ledger.note(policy_version=version, policy_state=state)


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
