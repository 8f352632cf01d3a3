"""Compute advantages of a group once the whole group has arrived."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from flashpatch.patches.grpo.errors import refuse


@dataclass(frozen=True)
class Scored:
    """Hold a sample with its advantage (reward less the group's mean, divided by its standard deviation)."""

    sample: Any
    advantage: float


class GroupGate:
    """Hold samples until their whole group has arrived; then return the group with advantages.

    verl's replay buffer does the same for prompts (``status`` "finished"); this is for pipelines of one's
    own.

    Args:
        size: samples of a group (verl: ``rollout.n``).
        normalize: divide by the standard deviation, as GRPO; not as in Dr. GRPO (Liu et al. 2025).
        epsilon: added to it, as verl does.

    Raises:
        PatchError: ``size`` is below 1.
    """

    def __init__(self, size: int, *, normalize: bool = True, epsilon: float = 1e-6) -> None:
        if size < 1:
            refuse("groups", "size", f"is {size}.", "Give the number of samples per prompt.")
        self.size, self.normalize, self.epsilon = size, normalize, epsilon
        self._open: dict[Hashable, list[tuple[Any, float]]] = {}
        self._missing: dict[Hashable, int] = {}

    @property
    def waiting(self) -> int:
        """Count the held samples."""
        return sum(map(len, self._open.values()))

    def add(self, group: Hashable, sample: Any, reward: float) -> list[Scored]:
        """Add one sample with its reward; return its group when it was the last one, else nothing."""
        self._open.setdefault(group, []).append((sample, reward))
        return self._pass(group)

    def fail(self, group: Hashable) -> list[Scored]:
        """Drop one sample of the group; return the others when it was the last one missing.

        A group whose samples all failed gives nothing and is forgotten.
        """
        self._missing[group] = self._missing.get(group, 0) + 1
        return self._pass(group)

    def _pass(self, group: Hashable) -> list[Scored]:
        members = self._open.get(group, [])
        if len(members) + self._missing.get(group, 0) < self.size:
            return []
        self._open.pop(group, None)
        self._missing.pop(group, None)
        return [
            Scored(sample, gain) for (sample, _), gain in zip(members, self.advantages(members), strict=True)
        ]

    def advantages(self, members: list[tuple[Any, float]]) -> list[float]:
        """As ``verl.trainer.ppo.core_algos.compute_grpo_outcome_advantage``: a lone sample keeps its
        reward."""
        rewards = [reward for _, reward in members]
        if len(rewards) < 2:
            return [reward / (1 + self.epsilon) for reward in rewards] if self.normalize else rewards
        mean = sum(rewards) / len(rewards)
        if not self.normalize:
            return [reward - mean for reward in rewards]
        deviation = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
        return [(reward - mean) / (deviation + self.epsilon) for reward in rewards]
