"""Record the versions of one engine's drafter."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from flashpatch import ledger
from flashpatch.patches.eagle.drafter_refit.acceptance import Acceptance

logger = logging.getLogger("flashpatch.eagle")

_LOGGED = 8  # updates kept


class Weights(NamedTuple):
    """Describe weights of a drafter: their version, and the checkpoint they came from, "" if there is none."""

    version: int
    path: str = ""


class DrafterVersions:
    """Record which weights draft.

    Args:
        path: of the checkpoint that the engine was opened with, "" if there is none.
        acceptance: of the drafter; the engine adds each step to it.
        refresh_bandit: makes the engine's bandit trust less what it learned with other weights of drafter or target.

    Attributes:
        current: the weights that draft.
        log: one entry per update, newest last: ``version``, ``path``, and ``before``, the acceptance length of the weights
            that it replaced."""

    def __init__(self, path: str, acceptance: Acceptance, refresh_bandit: Callable[[], None]) -> None:
        self.current = Weights(0, path)
        self.acceptance, self.refresh_bandit = acceptance, refresh_bandit
        self.log: list[dict[str, Any]] = []

    def state(self) -> dict[str, Any]:
        """Return version and path of `current`, and tokens per step over the last speculative steps."""
        version, path = self.current
        return {"drafter": version, "drafter_path": path, "acceptance": self.acceptance.length}

    def record_update(self, weights: Weights) -> None:
        """Record weights that every worker has loaded."""
        entry = {**weights._asdict(), "before": self.acceptance.length}
        self.current = weights
        self.acceptance.restart()
        self.refresh_bandit()
        self.log = [*self.log, entry][-_LOGGED:]
        logger.info("drafter: %s", entry)
        ledger.event("drafter", **entry)
        ledger.note(eagle_drafter={**weights._asdict(), "log": self.log})
