"""An engine's steps: one of decoding by batch, and a prefill.

The fake device's loops in Python are left out: attention, and the slots of the KV cache."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import vllm

from felting import counting, models

PREFILL, LONG = 8192, 512  # tokens of the step, and of each of its requests


class Steps:
    """Stand around an engine core's steps and measure them: first calls of Python, then launches, then time.

    Attributes:
        found: by kind and by what is measured, its values."""

    def __init__(self, core: Any) -> None:
        self.found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._own, self._step = counting.Own(vllm), core.step_fn
        self._kind, self._count, self._number, self._tokens = "", 0, 0, 0
        self._timing = ExitStack()
        self._passed: Callable[[], float] | None = None
        schedule = core.scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            scheduled = schedule(*args, **kwargs)
            self._tokens = scheduled.total_num_scheduled_tokens
            return scheduled

        core.scheduler.schedule, core.step_fn = noted, self.step

    @contextmanager
    def of(self, kind: str, count: int) -> Iterator[None]:
        """Measure within; some ``count`` steps of this kind come."""
        self._kind, self._count, self._number = kind, count, 0
        with self._timing:
            yield
        self._kind, self._passed = "", None

    def step(self) -> Any:
        if not self._kind:
            return self._step()
        now: dict[str, float] = {}
        self._tokens, third = 0, 3 * self._number // self._count
        if third == 0:
            with self._own.calls() as calls:
                result = self._step()
            now["calls"] = calls["own"]
        elif third == 1:
            before = counting.memory()
            with counting.launches() as counted:
                result = self._step()
            after = counting.memory()
            now |= dict(launches=counted.seen.total(), waits=counted.waits.total())
            now |= {name: after[name] - before[name] for name in after}
        else:
            if self._passed is None:
                self._passed = self._timing.enter_context(self._own.microseconds())
            self._passed()
            result = self._step()
            now["us"] = self._passed()
        if self._tokens:  # else the step only hands out what is done
            self._number += 1
            for name, value in now.items():
                self.found[self._kind][name].append(value)
        return result


def measured(folder: Path, precision: str, batches: list[int], count: int) -> dict[str, Any]:
    """Open an engine, and return by kind of step the medians of what was measured, and how many captured requests were lost."""
    if os.environ.get("FAKE_CUDA"):
        from vllm.v1.attention.backends import flash_attn
        from vllm.v1.worker import block_table

        flash_attn.flash_attn_varlen_func = lambda q, *_, out=None, **__: q if out is None else out.zero_()
        block_table.BlockTable.compute_slot_mapping = lambda *_, **__: None
    llm = models.opened(
        folder,
        "steps",
        precision,
        max_model_len=LONG + 16,
        max_num_seqs=max(batches + [PREFILL // LONG]),
        max_num_batched_tokens=PREFILL,
        kv_cache_memory_bytes=64 << 20,
    )
    steps = Steps(llm.llm_engine.engine_core.engine_core)
    behind: dict[str, float] = {}
    wall: dict[str, float] = {}
    for batch in batches:
        _ask(llm, batch, 4, 3)
        wall[f"decode {batch}"] = _wall(llm, batch, count)
        _stored()
        with steps.of(f"decode {batch}", count):
            _ask(llm, batch, 4, count)
        began = _stored()
        _ask(llm, batch, 4, count)
        behind[f"decode {batch}"] = (_stored() - began) / count
    with steps.of("prefill", 12):
        for _ in range(12):
            _ask(llm, PREFILL // LONG, LONG, 1)
    found: dict[str, Any] = {
        kind: {key: statistics.median(some) for key, some in values.items()}
        | dict(behind=behind.get(kind, 0), wall=wall.get(kind, 0), least=min(values["us"]))
        for kind, values in steps.found.items()
    }
    return found | {"lost": _lost()}


def _ask(llm: Any, batch: int, prompt: int, count: int) -> None:
    import vllm

    sampling = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [3 + (7 * row + i) % 400 for i in range(prompt)]} for row in range(batch)]
    llm.generate(prompts, sampling, use_tqdm=False)


def _wall(llm: Any, batch: int, count: int) -> float:
    """Return the microseconds of a step by the clock, out of ``count``, the median of three times."""

    def once() -> float:
        began = time.perf_counter()
        _ask(llm, batch, 4, count)
        return (time.perf_counter() - began) * 1e6 / count

    return statistics.median(once() for _ in range(3))


def _stored() -> float:
    """Wait until what was captured is stored; return the microseconds of processor time of FlashPatch's threads so far."""
    for recorder in _recorders():
        recorder.flush(60)
    ours = [one.ident for one in threading.enumerate() if one.name.startswith("flashpatch")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(one)) for one in ours) * 1e6


def _lost() -> int:
    """Return how many captured requests were given up, or dropped on their way to the queue."""
    return sum(one.counts["lost"] + one.writer.counts["dropped"] for one in _recorders() if one.flush(60))


def _recorders() -> list[Any]:
    from flashpatch.patches.eagle.vllm import capture

    return [one.recorder for one in capture._captures.values() if one is not None]
