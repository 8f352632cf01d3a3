"""Versions of one engine's drafter: judge each update by acceptance and roll back a worse one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from flashpatch import ledger
from flashpatch.patches.eagle.drafter_refit.acceptance_check import AcceptanceCheck, DraftCounts

logger = logging.getLogger("flashpatch.eagle")

_LOGGED = 32  # events kept
_NOTED = 8  # events written to the ledger


class Weights(NamedTuple):
    """Weights of a drafter: their version, and the checkpoint they came from, "" where there is none."""

    version: int
    path: str = ""


class DrafterVersions(ABC):
    """Follow the versions of one drafter.

    Attributes:
        current: the weights in use.
        good: the weights that a rollback returns to.
        check: compares acceptance before and after an update.
        log: one entry per event, newest last. ``event`` is ``update``, ``kept``, ``worse`` or ``rollback``;
            ``before`` and ``after`` are acceptance lengths.
    """

    def __init__(self, weights: Weights, check: AcceptanceCheck) -> None:
        self.good = self.current = weights
        self.check = check
        self.log: list[dict[str, Any]] = []

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self.current.version

    def record_update(self, weights: Weights) -> None:
        """Record weights that every worker has loaded, and start to judge them."""
        self.current = weights
        self.refresh_bandit()
        self._note("update", weights, before=self.check.start())

    def observe(self, counts: DraftCounts) -> None:
        """Add a step that verified drafts; accept or reject the last update once that can be judged."""
        verdict = self.check.add(counts)
        if verdict is None:
            return
        before, after, keep = verdict
        self._note("kept" if keep else "worse", self.current, before=before, after=after)
        if keep:
            self.good = self.current
            self.forget_backup()
        else:
            logger.warning(
                "drafter %s lowered the acceptance length from %.2f to %.2f: rolling back to %s",
                self.version,
                before,
                after,
                self.good.version,
            )
            self.roll_back()

    def record_rollback(self) -> None:
        """Record that the last good weights are in use again."""
        self.current = self.good
        self.refresh_bandit()
        self.check.cancel()
        self._note("rollback", self.good)

    @abstractmethod
    def roll_back(self) -> None:
        """Load `good` again, now or before the next step, and then call `record_rollback`."""

    @abstractmethod
    def refresh_bandit(self) -> None:
        """Make the engine's bandit trust less what it learned with other weights."""

    def forget_backup(self) -> None:  # noqa: B027
        """Drop what was kept for a rollback of the last update. Does nothing unless an engine keeps it."""

    def _note(self, event: str, weights: Weights, **facts: Any) -> None:
        entry = {"event": event, **weights._asdict(), **facts}
        self.log.append(entry)
        del self.log[:-_LOGGED]
        logger.info("drafter: %s", entry)
        ledger.event("drafter", what=event, **weights._asdict(), **facts)
        ledger.note(eagle_drafter={**self.current._asdict(), "log": self.log[-_NOTED:]})
