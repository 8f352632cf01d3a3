"""What the rules over sliding windows share: one window per group, and a warm-up that borrows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashpatch.patches.eagle.bandit.rules.base import Rule, Setting
from flashpatch.patches.eagle.bandit.window import Window


class Windowed(Rule):
    """A window per group. A group met for the first time takes one step per arm over from the nearest known
    one.

    Only arms that no group ever ran are warmed up by running them, ``warm_up`` steps each.
    """

    warm_up = 2

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._windows: list[Window | None] = [None] * len(setting.groups)
        self._run = [0] * len(setting.arms)

    def window(self, group: int) -> Window:
        """The window of a group."""
        return self._windows[group] or self._open(group)

    def cold(self, allowed: tuple[int, ...]) -> int:
        """An allowed arm whose warm-up is not over, or -1."""
        for arm in allowed:
            if self._run[arm] < self.warm_up:
                return arm
        return -1

    def learn(self, group: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        self._run[arm] += 1
        (self._windows[group] or self._open(group)).add(arm, tokens, seconds)

    def rates(self, group: int) -> Sequence[float]:
        window = self._windows[group]
        return window.rate if window else [0.0] * len(self.setting.arms)

    def _open(self, group: int) -> Window:
        self._windows[group] = window = Window(len(self.setting.arms), self.setting.window)
        edges = self.setting.groups.edges
        known = [other for other, seen in enumerate(self._windows) if seen and seen.seen]
        if known:
            nearest = min(known, key=lambda other: (abs(other - group), other))
            scale = edges[group] / edges[nearest]
            source = self._windows[nearest]
            for arm, rate in enumerate(source.rate):
                if rate:
                    seconds = source.seconds[arm] / source.pulls[arm] if source.pulls[arm] else 1.0 / rate
                    window.add(arm, rate * scale * seconds, seconds)
        return window

    def state(self) -> dict[str, Any]:
        windows = {str(group): window.state() for group, window in enumerate(self._windows) if window}
        return {"windows": windows, "run": list(self._run)}

    def restore(self, state: dict[str, Any]) -> None:
        self._run = list(state["run"])
        self._windows = [None] * len(self.setting.groups)
        for group, saved in state["windows"].items():
            self._windows[int(group)] = window = Window(len(self.setting.arms), self.setting.window)
            window.restore(saved)
