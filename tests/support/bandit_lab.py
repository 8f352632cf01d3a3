"""Simulate engines for tests of the bandit."""

import random
from collections import Counter

from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.policy import Policy

ARMS = ("disable", "1_1_2", "3_1_4", "5_1_6")


class Clock:
    """Tell the time that a simulated engine says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Accept each draft with probability `p`; a step costs 1 plus ``cost`` per draft step, with 2 % noise."""

    def __init__(self, p: float, cost: float = 0.1, seed: int = 0) -> None:
        self.p, self.cost, self._random = p, cost, random.Random(seed)

    def step(self, arm: Arm, batch: int) -> tuple[float, float]:
        tokens = batch
        for _ in range(batch):
            for _ in range(arm.steps):
                if self._random.random() >= self.p:
                    break
                tokens += 1
        return float(tokens), (1.0 + self.cost * arm.steps) * self._random.gauss(1.0, 0.02)

    def rate(self, arm: Arm) -> float:
        """Return expected tokens per request and second."""
        return sum(self.p**step for step in range(arm.steps + 1)) / (1.0 + self.cost * arm.steps)


def drive(policy: Policy, engine: Engine, steps: int, batch: int = 4) -> Counter[Arm]:
    """Run an engine under a policy; return how often each arm ran."""
    ran: Counter[Arm] = Counter()
    for _ in range(steps):
        arm = policy.select(batch)
        ran[arm] += 1
        policy.update(batch, arm, *engine.step(arm, batch))
    return ran
