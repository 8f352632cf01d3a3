"""Let the bandit choose the configuration of each decode batch of a worker, and learn from the batches.

A batch is rewarded when its accepted counts reach the host, which SGLang reports without waiting for the
device: tokens by the time since the batch was chosen for, or since the batch before was done."""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any

from flashpatch.patches.eagle.bandit.arm import Arm, check_room, parse_arms
from flashpatch.patches.eagle.bandit.controller import Controller
from flashpatch.patches.eagle.bandit.policy import Policy
from flashpatch.patches.eagle.bandit.rank_broadcast import RankBroadcast


class SpecController(Controller):
    """Choose for one worker, and learn from its batches.

    Attributes:
        finished: the arm of the last batch that is done."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(policy, clock)
        self.finished = Arm.DISABLE
        self._running: deque[tuple[int, Arm, float]] = deque()
        self._finished = 0.0  # when the batch before was done

    def choose(self, batch_size: int) -> Arm:
        """Return the arm for a batch that is about to run."""
        started = self.clock()
        arm = super().choose(batch_size)
        self._running.append((batch_size, arm, started))
        return arm

    def step_finished(self, accepted: list[int], batch_size: int) -> None:
        """Learn from a batch: drafts accepted per request, the target's own token not counted."""
        if not self._running:
            return
        size, arm, started = self._running.popleft()
        now, self.finished = self.clock(), arm
        if size == batch_size:
            self.policy.update(size, arm, sum(accepted) + len(accepted), now - max(started, self._finished))
        if arm.steps:
            self.count_drafts(len(accepted), len(accepted) * (arm.draft_tokens - 1), sum(accepted))
        self._finished = now
        self.report_if_due(now)


class BanditStepsPolicy:
    """Implement SGLang's ``AdaptiveSpecPolicy`` with the bandit: an arm is a number of steps."""

    def __init__(self, controller: SpecController) -> None:
        self._controller = controller
        self._sizes: list[int] | None = None

    @property
    def candidate_steps(self) -> list[int]:
        return sorted({arm.steps for arm in (*self._controller.policy.arms, Arm.DISABLE)})

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Note the batch sizes of graphs; None without graphs."""
        self._sizes = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Return the sizes to capture for an arm: up to the first that holds the largest batch that the guard lets it run."""
        most, sizes = self._controller.policy.guard // (step + 1), sorted(self._sizes or ())
        return sizes[: bisect_left(sizes, most) + 1] if step and sizes else self._sizes

    def get_steps_for_batch(self, batch_size: int) -> int:
        return self._controller.choose(batch_size).steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        self._controller.step_finished(num_correct_drafts_per_req, batch_size)
        return None  # the next batch decides for itself


controllers: weakref.WeakKeyDictionary[Any, SpecController] = weakref.WeakKeyDictionary()


def engine_arms(asked: list[Any], own: Arm) -> tuple[Arm, ...]:
    """Return the arms of an engine opened as ``own``: those asked for, or that one, shorter ones, and none. Raises
    PatchError if an arm is larger than what the engine has room for."""
    if not asked:
        chains = [Arm(steps, 1, steps + 1) for steps in (1, 2, 3, 5, 7) if steps < own.steps]
        arms = (own, *chains) if own.topk > 1 else (own, *(arm for arm in chains if arm != own))
        return (*arms, Arm.DISABLE)
    arms = parse_arms(asked)
    check_room(arms, own, "eagle.sglang.init_cuda_graphs")
    return arms


def make_policy(options: Any, own: Arm, broadcast: RankBroadcast | None = None) -> Policy:
    """Make the bandit that the family's options describe, for an engine opened as ``own``; ``broadcast`` makes all its
    ranks run the same arm. Raises PatchError for an arm larger than what the engine has room for."""
    return Policy(engine_arms(options["arms"], own), options["guard"], broadcast=broadcast)
