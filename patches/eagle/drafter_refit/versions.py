"""Judge each update of one engine's drafter by acceptance, and roll back a worse one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from flashpatch import ledger
from flashpatch.patches.eagle.drafter_refit.acceptance_check import (
    DOUBTED,
    KEPT,
    WORSE,
    AcceptanceCheck,
    DraftCounts,
)

logger = logging.getLogger("flashpatch.eagle")

_LOGGED = 32  # events kept
_NOTED = 8  # events written to the ledger


class Weights(NamedTuple):
    """Describe weights of a drafter: their version, and the checkpoint they came from, "" if there is none."""

    version: int
    path: str = ""


class DrafterVersions(ABC):
    """Follow the versions of one drafter.

    Attributes:
        current: the newest weights that were not rolled back.
        good: the weights that a rollback returns to.
        in_use: the weights that draft: `current`, or `good` while they are tried.
        check: compares acceptance before and after an update.
        log: one entry per event, newest last. ``event`` is ``update``, ``kept``, ``doubted``, ``trial``, ``worse``,
            ``rollback`` or ``unjudged``; ``before`` and ``after`` are acceptance lengths."""

    def __init__(self, weights: Weights, check: AcceptanceCheck) -> None:
        self.good = self.current = self.in_use = weights
        self.check = check
        self.log: list[dict[str, Any]] = []
        self._judged = weights  # what the next verdict is about
        self._condemned: float | None = None  # acceptance of `good`, while it is loaded after a verdict

    @property
    def version(self) -> int:
        """Version of `current`."""
        return self.current.version

    def state(self) -> dict[str, Any]:
        """Return version and path of `current`, the path of `good`, and tokens per step over the last speculative steps."""
        return {
            "drafter": self.version,
            "drafter_path": self.current.path,
            "drafter_good": self.good.path,
            "acceptance": self.check.acceptance_length,
        }

    def policy_updated(self) -> None:
        """Record that the target has new weights, to which the drafter may not fit."""
        self.check.policy_updated()
        self.refresh_bandit()

    def record_update(self, weights: Weights) -> None:
        """Record weights that every worker has loaded, and start to judge them; while `good` is tried they are put aside."""
        self.current = self.in_use = weights
        self.refresh_bandit()
        if self.check.on_trial:
            self._note("update", weights, before=self.check.acceptance_length)
            self.check.pause_trial()
            self.load(self.good, self._begin_trial)
            return
        self._judged = weights
        before, self._condemned = self._condemned, None
        if before is None:
            before = self.check.start()
        else:
            self.check.go_on(before)
        self._note("update", weights, before=before)

    def observe(self, counts: DraftCounts) -> None:
        """Add a step that verified drafts; keep, doubt or reject the last update once that can be judged."""
        was_tried = self.check.on_trial
        verdict = self.check.add(counts)
        if verdict is None:
            return
        before, after, outcome = verdict
        self._note(outcome, self.current if outcome == WORSE else self._judged, before=before, after=after)
        if outcome == DOUBTED:
            self.load(self.good, self._begin_trial)
        elif outcome == KEPT and was_tried:
            self.load(self.current, lambda: self._end_trial(before))
        elif outcome == KEPT:
            self._keep()
        else:
            logger.warning(
                "drafter %s has an acceptance length of %.2f, the one before %.2f: rolling back to %s",
                self.version,
                after,
                before,
                self.good.version,
            )
            self._condemned = before
            if was_tried:
                self.record_rollback()
            else:
                self.load(self.good, self.record_rollback)

    def record_rollback(self) -> None:
        """Record that the last good weights are in use again, for good."""
        self.current = self.in_use = self.good
        self._condemned = None
        self.refresh_bandit()
        self.check.cancel()
        self.forget_backup()
        self._note("rollback", self.good)

    def load_failed(self) -> None:
        """Record that the weights that `load` was given cannot be loaded: those in use stay."""
        if self.in_use is not self.current:
            self.record_rollback()
            return
        self._condemned = None
        self.check.cancel()
        self._note("unjudged", self.current)

    @abstractmethod
    def load(self, weights: Weights, then: Callable[[], None]) -> None:
        """Make the engine draft with ``weights``, `good` or `current`, now or before the next step, and then call ``then``."""

    @abstractmethod
    def refresh_bandit(self) -> None:
        """Make the engine's bandit trust less what it learned with other weights."""

    def forget_backup(self) -> None:  # noqa: B027
        """Drop what was kept for a rollback of the last update. Does nothing unless an engine keeps it."""

    def _begin_trial(self) -> None:
        self.in_use = self.good
        self.refresh_bandit()
        self.check.start_trial()
        self._note("trial", self.good)

    def _end_trial(self, before: float) -> None:
        self.in_use = self.current
        self.refresh_bandit()
        self.check.cancel()
        if self.current is self._judged:
            self._keep()
        else:  # they came during the trial
            self._judged = self.current
            self.check.go_on(before)

    def _keep(self) -> None:
        self.good = self.current
        self.forget_backup()

    def _note(self, event: str, weights: Weights, **facts: Any) -> None:
        entry = {"event": event, **weights._asdict(), **facts}
        self.log.append(entry)
        del self.log[:-_LOGGED]
        logger.info("drafter: %s", entry)
        ledger.event("drafter", what=event, **weights._asdict(), **facts)
        ledger.note(eagle_drafter={**self.current._asdict(), "log": self.log[-_NOTED:]})
