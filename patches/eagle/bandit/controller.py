"""Hold the part of an engine's speculation controller that is the same for every engine."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches._shared.atomic_file import replacing
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.policy import Policy

logger = logging.getLogger("flashpatch.eagle")

_NOTE_SECONDS = 1.0  # between two notes to the ledger
_RECENT = 64  # choices that are remembered, and steps of which acceptance is the mean
_SAMPLED = ("arm", "drafted", "accepted", "acceptance_length")  # of a report, for the ledger's events


class Controller:
    """Choose the arm of each decode step of one engine, count acceptance, and report to the ledger.

    Subclasses call `choose` before a step, `count_drafts` and `Policy.update` after it, and then `report_if_due`.

    Args:
        policy: the bandit.
        state: file that keeps what the policy learned, or None.
        clock: seconds.

    Attributes:
        recent: the last arms chosen, held ones included.
        drafts: steps of single requests in which drafts were verified, since the start.
        drafted, accepted: draft tokens verified and accepted, since the start."""

    save_seconds = 10.0
    """Seconds between two writes of the state file."""

    def __init__(
        self, policy: Policy, state: Path | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.policy, self.clock, self._state = policy, clock, state
        self.recent: deque[Arm] = deque(maxlen=_RECENT)
        self.drafts = self.drafted = self.accepted = 0
        self._verified = deque[tuple[int, int]](maxlen=_RECENT)  # requests and accepted tokens of a step
        self._noted = self._saved = clock()
        ledger.note(eagle_arms=[str(arm) for arm in policy.arms], eagle_rule=policy.rule_name)
        if state is not None:
            ledger.note(eagle_state=restore(policy, state))

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
        """Write to the ledger and to the state file when their intervals have passed; ``now`` is `clock`'s."""
        if now - self._noted > _NOTE_SECONDS:
            self.note()
        if now - self._saved > self.save_seconds:
            self.save()

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

    def save(self) -> None:
        """Write what was learned to the state file, if there is one, whole or not at all. A failure is logged, not raised."""
        if self._state is None:
            return
        self._saved = self.clock()
        try:
            self._state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self._state) as temporary:
                temporary.write_text(json.dumps(self.policy.state()))
        except OSError as error:
            logger.warning("what the bandit learned cannot be saved: %s", error)


def restore(policy: Policy, path: Path) -> str:
    """Restore the policy from a file, if there is one; return ``new``, ``restored`` or ``not restored: ...``, for the
    ledger. A file that does not fit is logged and left as it is: the policy starts with nothing learned."""
    try:
        policy.restore(json.loads(path.read_text()))
    except FileNotFoundError:
        return "new"
    except (OSError, ValueError, PatchError) as error:
        logger.warning("the bandit starts with nothing learned, %s cannot be used: %s", path, error)
        return f"not restored: {error}"
    return "restored"
