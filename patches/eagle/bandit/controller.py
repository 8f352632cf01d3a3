"""Hold the part of an engine's speculation controller that is the same for every engine."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from flashpatch import ledger
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.policy import Policy

_NOTE_SECONDS = 1.0  # between two notes to the ledger
_RECENT = 64  # choices that are remembered, and steps of which acceptance is the mean
_SAMPLED = ("arm", "drafted", "accepted", "acceptance_length")  # of a report, for the ledger's events


class Controller:
    """Choose the arm of each decode step of one engine, count acceptance, and report to the ledger.

    Subclasses call `choose` before a step, `count_drafts` and `Policy.update` after it, and then `report_if_due`.

    Args:
        policy: the bandit.
        clock: seconds.

    Attributes:
        recent: the last arms chosen, held ones included.
        drafts: steps of single requests in which drafts were verified, since the start.
        drafted, accepted: draft tokens verified and accepted, since the start."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.perf_counter) -> None:
        self.policy, self.clock = policy, clock
        self.recent: deque[Arm] = deque(maxlen=_RECENT)
        self.drafts = self.drafted = self.accepted = 0
        self._verified = deque[tuple[int, int]](maxlen=_RECENT)  # requests and accepted tokens of a step
        self._noted = clock()
        ledger.note(eagle_arms=[str(arm) for arm in policy.arms])

    def choose(self, batch_size: int) -> Arm:
        """Return the arm for the next step over ``batch_size`` requests."""
        arm = self.policy.select(batch_size)
        self.recent.append(arm)
        return arm

    def count_drafts(self, requests: int, drafted: int, accepted: int) -> None:
        """Add a step that verified ``drafted`` tokens over ``requests`` requests and accepted some of them."""
        if drafted and not self.drafted:
            self._noted = -math.inf  # the first drafts are told at once
        self._verified.append((requests, accepted))
        self.drafts += requests
        self.drafted += drafted
        self.accepted += accepted

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a request's step, the target's own included, over the last speculative steps; 0 before the first."""
        requests, accepted = map(sum, zip(*self._verified, strict=True)) if self._verified else (0, 0)
        return 1 + accepted / requests if requests else 0.0

    def report_if_due(self, now: float) -> None:
        """Write to the ledger when its interval has passed; ``now`` is `clock`'s."""
        if now - self._noted > _NOTE_SECONDS:
            self.note()

    def note(self) -> None:
        """Write choices and metrics to the ledger."""
        self._noted = self.clock()
        report = self.report()
        ledger.note(eagle_bandit=report)
        ledger.sample("speculation", **{name: report[name] for name in _SAMPLED}, arms=self.policy.pulls())

    def report(self) -> dict[str, Any]:
        """Return the ledger's ``eagle_bandit``: the last arms, acceptance, and the policy's metrics."""
        recent = [str(arm) for arm in self.recent]
        return {
            "arm": recent[-1] if recent else None,
            "recent": recent[-16:],
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            **self.policy.metrics(),
        }
