"""Choose an arm before each decode step: one bandit per bucket of batch sizes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flashpatch.patches.eagle.bandit.arm import Arm, parse_arms
from flashpatch.patches.eagle.bandit.buckets import BUCKETS, bucket_of
from flashpatch.patches.eagle.bandit.thompson import HOLD, Thompson

if TYPE_CHECKING:
    from flashpatch.patches.eagle.bandit.rank_broadcast import RankBroadcast

MAX_SECONDS = 1e6  # seconds of a step; a longer one is a clock that jumped


class Policy:
    """Choose the arm of each decode step.

    `select` and `update` cost a few microseconds, and do not grow with the steps seen. An
    observation that cannot be true is counted and otherwise ignored.

    Args:
        arms: arms or their texts, e.g. ``["3_1_4", "5_1_6", "disable"]``.
        guard: most tokens that a step may verify over the batch. An arm beyond it is never chosen; if it
            leaves none, the choice is ``disable``.
        window: steps, at least 2, after which an observation weighs little or nothing.
        seed: of the random draws.
        broadcast: makes all ranks of an engine run the same arm.

    Raises:
        PatchError: a malformed arm."""

    def __init__(
        self,
        arms: Iterable[str | Arm],
        guard: int = 2048,
        window: int = 300,
        seed: int = 0,
        broadcast: RankBroadcast | None = None,
    ) -> None:
        self.arms = parse_arms(arms)
        self.guard = guard
        self._place = {arm: place for place, arm in enumerate(self.arms)}
        self.rule = Thompson(self.arms, window, random.Random(seed))
        self._broadcast = broadcast
        self._step = 0
        self._hold_left = 0
        self._current = -1  # place of the arm the engine runs, -1 before the first
        self._ran = -1  # place of the arm of the last update
        self._pulls = [[0] * len(self.arms) for _ in BUCKETS]
        self._switches = self._ignored = 0

    def select(self, batch_size: int) -> Arm:
        """Return the arm for the next step over ``batch_size`` requests; ``disable`` for an empty batch. Raises
        PatchError if the ranks of `broadcast` are at different steps."""
        self._step += 1
        allowed = self._allow(batch_size)
        current = self._current
        if self._hold_left > 0 and current in allowed:
            self._hold_left -= 1
            return self.arms[current]
        if len(allowed) > 1:
            chosen = -1
            if self._broadcast is None or self._broadcast.is_leader:
                bucket = bucket_of(batch_size)
                chosen = self.rule.choose(bucket, allowed, current)
            if self._broadcast is not None:
                chosen = self._broadcast(self._step, batch_size, chosen)
            self._hold_left = HOLD - 1
        else:
            chosen = allowed[0] if allowed else -1
            self._hold_left = 0
        self._switches += chosen != current
        self._current = chosen
        return self.arms[chosen] if chosen >= 0 else Arm.DISABLE

    def update(self, batch_size: int, arm: Arm, accepted_tokens: float, seconds: float) -> None:
        """Learn from a step.

        Args:
            batch_size: requests in the step.
            arm: the arm that ran.
            accepted_tokens: tokens of the step over all requests, between 1 and ``batch_size * (steps + 1)``.
            seconds: time of the step, with the switch if there was one."""
        place = self._place.get(arm, -1)
        if place < 0 and arm == Arm.DISABLE:  # the guard's choice, which is no arm of this policy
            self._ran = -1
            return
        try:
            valid = (
                place >= 0
                and 1 <= batch_size <= 1_000_000
                and 1.0 <= accepted_tokens <= batch_size * (arm.steps + 1)
                and 1e-9 < seconds < MAX_SECONDS
            )
        except TypeError:
            valid = False
        if not valid:  # NaN compares false with everything, so it ends here too
            self._ignored += 1
            return
        bucket = bucket_of(batch_size)
        self.rule.learn(bucket, batch_size, place, accepted_tokens, seconds, place != self._ran)
        self._ran = place
        self._pulls[bucket][place] += 1

    def pulls(self) -> dict[str, int]:
        """Return how often each arm was chosen and measured since the start; empty if none was."""
        counts = [sum(column) for column in zip(*self._pulls, strict=True)]
        return dict(zip(map(str, self.arms), counts, strict=True)) if any(counts) else {}

    def refresh(self) -> None:
        """Trust less what was learned so far: drafter or policy have new weights."""
        self.rule.refresh()
        self._hold_left = 0

    def metrics(self) -> dict[str, float]:
        """Return totals, and per bucket seen the pulls and estimated rates of each arm, flat."""
        found: dict[str, float] = {
            "steps": float(sum(map(sum, self._pulls))),
            "switches": float(self._switches),
            "ignored": float(self._ignored),
        }
        for bucket, pulls in enumerate(self._pulls):
            if any(pulls):
                rates = self.rule.rates(bucket)
                for place, arm in enumerate(self.arms):
                    found[f"batch_{BUCKETS[bucket]}/{arm}/pulls"] = float(pulls[place])
                    found[f"batch_{BUCKETS[bucket]}/{arm}/tokens_per_second"] = rates[place]
        return found

    def _allow(self, batch_size: int) -> tuple[int, ...]:
        """Return the places of the arms within the guard."""
        if batch_size < 1 or 2 * batch_size > self.guard:  # the smallest draft verifies two tokens
            return (self._place[Arm.DISABLE],) if Arm.DISABLE in self._place else ()
        return tuple(
            place for place, arm in enumerate(self.arms) if arm.draft_tokens * batch_size <= self.guard
        )
