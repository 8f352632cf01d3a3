"""Choose by UCB over a sliding window with the cost of switching, for rewards that drift.

Sliding-window UCB is from Garivier and Moulines, "On Upper-Confidence Bound Policies for Switching Bandit
Problems" (2011); the bonus here is scaled by the observed spread of steps.
"""

from __future__ import annotations

from math import log, sqrt
from typing import Any

from flashpatch.patches.eagle.bandit.rules.base import Setting
from flashpatch.patches.eagle.bandit.rules.switching import SwitchCost
from flashpatch.patches.eagle.bandit.rules.windowed import Windowed


class WindowUcb(Windowed):
    """Choose the arm with the highest bound on its rate, less the cost of the switch to it.

    An arm that did not run within the window runs once more.
    """

    hold = 2
    scale = 0.5

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.cost = SwitchCost()

    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        unwarmed = self.unwarmed_arm(allowed)
        if unwarmed >= 0:
            return unwarmed
        window = self.window(bucket)
        rate, pulls = window.rate, window.pulls
        self.best = max([rate[arm] for arm in allowed])
        wide = self.scale * sqrt(window.spread * 2.0 * log(min(window.seen, window.length) + 1.0))
        stay = 1.0
        if current >= 0 and pulls[current]:
            stay = self.cost.factor(window.seconds[current] / pulls[current], self.hold)
        top, chosen = -1.0, allowed[0]
        for arm in allowed:
            if not pulls[arm]:  # out of the window: one step per window, to notice a recovery
                return arm
            index = rate[arm] * (1.0 + wide / sqrt(pulls[arm]))
            if arm != current:
                index *= stay
            if index > top:
                top, chosen = index, arm
        return chosen

    def learn(self, bucket: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        window = self.window(bucket)
        pulls = window.pulls[arm]
        if pulls:
            # The first step after a switch includes the switch, which is not a property of the arm.
            usual = window.seconds[arm] / pulls
            if switched:
                self.cost.add(seconds - usual)
                seconds = min(seconds, usual)
            else:
                seconds = min(seconds, 4.0 * usual)
        self._run[arm] += 1
        window.add(arm, tokens, seconds)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "cost": self.cost.seconds}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.cost.seconds = state["cost"]
