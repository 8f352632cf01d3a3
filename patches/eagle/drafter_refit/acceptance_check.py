"""Compare the acceptance of new drafter weights with that of the weights before.

The measure is the chance that a draft is accepted, given that those before it were. It does not depend on how many
tokens the bandit happened to ask for. From it follows the acceptance length at the engine's number of tokens.

A fall of acceptance condemns new weights only if the policy stayed as it was. A policy that moved costs any drafter
acceptance, so the old weights are then tried on the same policy, after the new ones, and the new ones go only if the
old ones do better there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

STEPS = 64
"""Speculative steps that a verdict takes."""
_SHARE = 4
"""The least that is believed is ``STEPS // 4`` steps: of the newest weights, if updates follow each other faster than
verdicts, and of the weights before."""

KEPT, WORSE, DOUBTED = "kept", "worse", "doubted"


@dataclass
class DraftCounts:
    """Count drafts tried and accepted. A draft behind a rejected one was not tried."""

    tried: int = 0
    accepted: int = 0

    def acceptance_length(self, max_drafts: int) -> float:
        """Return the expected tokens of a step of ``max_drafts`` drafts, the target's own included; 0 if none
        was tried."""
        if not self.tried:
            return 0.0
        chance = self.accepted / self.tried
        return sum(chance**k for k in range(max_drafts + 1))


class Verdict(NamedTuple):
    """Hold the acceptance lengths of the old weights (``before``) and the new ones (``after``), and what follows.

    ``outcome`` is ``kept``, ``worse``, or ``doubted``: acceptance fell, but not for certain by the new weights, so the
    old ones are to be tried."""

    before: float
    after: float
    outcome: str


class AcceptanceCheck:
    """Follow acceptance, and judge new weights by the speculative steps before and after they came.

    Args:
        max_drafts: speculative tokens the engine has room for.
        tolerance: share of the acceptance length that new weights may cost; 1: any.
        steps: speculative steps that are compared on either side; by default `STEPS`."""

    def __init__(self, max_drafts: int, tolerance: float, steps: int | None = None) -> None:
        self.max_drafts, self.steps, self.tolerance = max_drafts, steps or STEPS, tolerance
        self._recent: deque[DraftCounts] = deque(maxlen=self.steps)
        self._phase: Literal["idle", "new", "loading", "old"] = "idle"
        self._before = self._after = 0.0
        self._good = 0.0  # acceptance length of the weights that the last verdict left
        self._sure = False  # `_before` is of enough steps, all of them under the present policy
        self._of_policy = 0  # steps under the present policy
        self._of_phase = 0  # steps since the phase began
        self._of_weights = 0  # steps of the newest weights

    @property
    def acceptance_length(self) -> float:
        """Acceptance length over the last speculative steps, 0 before the first."""
        return self._length(len(self._recent))

    @property
    def on_trial(self) -> bool:
        """Whether the old weights are tried, or will be once they are loaded."""
        return self._phase in ("loading", "old")

    def policy_updated(self) -> None:
        """Note that the target has other weights: what was measured before does not bind the drafter any more."""
        self._of_policy, self._sure = 0, False

    def start(self) -> float:
        """Begin to judge weights that have just been loaded; return the acceptance length before them.

        Weights that come before a verdict on earlier ones share their steps and are compared with the same ones as they.
        Without enough steps before them, what the last verdict measured counts; without one, the old weights are tried."""
        measured = len(self._recent)
        before = self.acceptance_length
        if measured < self.steps // _SHARE and self._good:
            before = self._good
        if self._phase == "idle":
            self._before, self._sure = before, self._of_policy >= measured >= self.steps // _SHARE
            self._enter("new")
        self._of_weights = 0
        return before

    def start_trial(self) -> None:
        """Begin to measure the old weights, which are loaded again, or go on with it."""
        self._phase = "old"

    def pause_trial(self) -> None:
        """Count no step until `start_trial`: the old weights are not in use."""
        self._phase = "loading"

    def go_on(self, before: float) -> None:
        """Begin to judge other new weights against old ones that have the acceptance length ``before``."""
        self._before, self._sure, self._of_weights = before, False, 0
        self._enter("new")

    def cancel(self) -> None:
        """Judge no weights, and restart counting."""
        self._enter("idle")

    def add(self, counts: DraftCounts) -> Verdict | None:
        """Add a step that verified drafts; return the verdict once there is one."""
        if self._phase == "loading":
            return None
        self._recent.append(counts)
        self._of_policy += 1
        self._of_phase += 1
        self._of_weights += 1
        if self._phase == "idle" or self._of_phase < self.steps:
            return None
        verdict = self._judge_old() if self._phase == "old" else self._judge_new()
        if verdict.outcome != DOUBTED:
            self._good = verdict.before if verdict.outcome == WORSE else verdict.after
        return verdict

    def _judge_new(self) -> Verdict:
        self._after = self._length(max(self._of_weights, self.steps // _SHARE))
        if not self._is_less(self._after, self._before or inf):
            outcome, self._phase = KEPT, "idle"
        elif self._sure and self._of_weights >= self.steps:
            outcome, self._phase = WORSE, "idle"
        else:
            outcome = DOUBTED
            self._enter("loading")
        return Verdict(self._before, self._after, outcome)

    def _judge_old(self) -> Verdict:
        now, self._phase = self.acceptance_length, "idle"
        return Verdict(now, self._after, WORSE if self._is_less(self._after, now) else KEPT)

    def _is_less(self, after: float, before: float) -> bool:
        return after < before * (1 - self.tolerance)

    def _length(self, steps: int) -> float:
        counted = list(self._recent)[-steps:] if steps else []
        total = DraftCounts(sum(one.tried for one in counted), sum(one.accepted for one in counted))
        return total.acceptance_length(self.max_drafts)

    def _enter(self, phase: Literal["idle", "new", "loading"]) -> None:
        self._phase, self._of_phase = phase, 0
        self._recent.clear()
