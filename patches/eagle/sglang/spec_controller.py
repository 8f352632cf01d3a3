"""One engine's bandit, and the steps whose reward is not known yet.

The reward of a step is known when its accepted counts reach the host, which SGLang reports without waiting for
the device: tokens by the time since the step began, or since the step before was done.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.patches.eagle.bandit import persistence
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.policy import Policy

_TELL = 1.0  # seconds between two reports to the ledger


class Chooser:
    """One worker's bandit, and the steps whose reward is not known yet.

    Args:
        policy: the bandit.
        clock: seconds.
        state: file that keeps what the policy learned, or None.
    """

    def __init__(self, policy: Policy, clock: Any = time.perf_counter, state: Path | None = None) -> None:
        self.policy, self.clock, self._state = policy, clock, state
        if state is not None:
            ledger.note(eagle_state=persistence.restore(policy, state))
        self.ran = Arm.DISABLE  # of the last batch that is done
        self._steps: deque[tuple[int, Arm, float]] = deque()
        self._done = 0.0
        self._told = clock()

    def choose(self, batch_size: int) -> Arm:
        """The arm for a batch that is about to run."""
        began = self.clock()
        arm = self.policy.select(batch_size)
        self._steps.append((batch_size, arm, began))
        return arm

    def learn(self, accepted: list[int], batch_size: int) -> None:
        """A batch is done: drafts accepted per request, the target's own token not counted."""
        if not self._steps:
            return
        size, arm, began = self._steps.popleft()
        now, self.ran = self.clock(), arm
        if size == batch_size:
            self.policy.update(size, arm, sum(accepted) + len(accepted), now - max(began, self._done))
        self._done = now
        if now - self._told > _TELL:
            self._told = now
            self.tell()

    def tell(self) -> None:
        """Where the bandit stands, into the ledger and its file."""
        current = self.policy.recent[-1][2] if self.policy.recent else None
        ledger.note(eagle_arm=str(current), eagle_bandit=self.policy.metrics())
        if self._state is not None:
            persistence.save(self.policy, self._state)


class Chains:
    """SGLang's ``AdaptiveSpecPolicy``, answered by the bandit: the arms are numbers of steps."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    @property
    def candidate_steps(self) -> list[int]:
        return sorted({arm.steps for arm in (*self._chooser.policy.arms, Arm.DISABLE)})

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Every state is captured for every batch size."""
        self._sizes = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        return self._sizes

    def get_steps_for_batch(self, batch_size: int) -> int:
        return self._chooser.choose(batch_size).steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        self._chooser.learn(num_correct_drafts_per_req, batch_size)
        return None  # the next batch decides for itself
