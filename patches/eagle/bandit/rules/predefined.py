"""Choose by a fixed table from batch size to arm; nothing is learned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.rules.base import Setting
from flashpatch.patches.eagle.bandit.rules.windowed import Windowed

THRESHOLDS = (1, 2, 5, 21)
"""Smallest batch sizes of FastRL's buckets; above 32 rows it does not speculate."""
SPECULATE_UP_TO = 32


class Predefined(Windowed):
    """Choose the arm of the table row with the smallest batch size not below the present one.

    Without a table the arms are spread over FastRL's thresholds, the largest draft on the smallest batch, and
    speculation ends at batch 32. Above the last row the arm is ``disable`` if it is among the arms, else the
    smallest draft. Windows are kept for the metrics only.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        rows = setting.table if setting.table is not None else default_table(setting.arms)
        self._edges = [batch for batch, _ in rows]
        self._arms = [arm for _, arm in rows]
        self._beyond = min(range(len(setting.arms)), key=lambda arm: setting.arms[arm].draft_tokens)

    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        row = bisect_left(self._edges, batch)
        arm = self._arms[row] if row < len(self._arms) else self._beyond
        if arm in allowed:
            return arm
        smaller = [other for other in allowed if self._tokens(other) <= self._tokens(arm)]
        return max(smaller or allowed, key=self._tokens)

    def _tokens(self, arm: int) -> int:
        return self.setting.arms[arm].draft_tokens

    def state(self) -> dict[str, Any]:
        return {**super().state(), "edges": self._edges, "arms": self._arms}


def default_table(arms: Sequence[Arm]) -> tuple[tuple[int, int], ...]:
    """Return rows (largest batch size, place of the arm): drafts from large to small over FastRL's
    thresholds."""
    drafting = [arm for arm in range(len(arms)) if arms[arm].steps]
    drafting.sort(key=lambda arm: arms[arm].draft_tokens, reverse=True)
    if not drafting:
        return ()
    edges = (*(start - 1 for start in THRESHOLDS[1:]), SPECULATE_UP_TO)
    last = len(edges) - 1
    return tuple((edge, drafting[place * (len(drafting) - 1) // last]) for place, edge in enumerate(edges))
