"""What capturing hidden states costs a decode step of vLLM, in one engine that captures every other round.

    python benchmarks/capture.py [--rounds 48] [--batch 8] [--tokens 48] [--hidden 512] [--layers 8] [--dtype float32]

Every request is captured (rate 1) and written to a ring in a temporary directory. Measures:

    hook         seconds the engine's thread spends in the capture hooks, as share of the steps' time; it holds on a
                 busy machine too
    background   processor seconds of the recorder's and the writer's threads, as share of the steps' time: what is
                 lost at most where no core is free for them
    processor    processor seconds of the whole process in a captured round over those in the round without beside it:
                 as hook and background together, but with what they cost the engine's own thread
    ratio        wall time of a captured round over that of the round without beside it

The last two are medians over the rounds, with the interval that holds the true median in 95 of 100 such runs.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import quick


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in dict(rounds=48, batch=8, tokens=48, hidden=512, layers=8).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32", help="bfloat16 crawls on a CPU without kernels for it")
    parser.add_argument("--json", action="store_true")
    wanted = quick.parse(parser, rounds=2, batch=2, tokens=4, hidden=256, layers=2)
    folder = Path(tempfile.mkdtemp(prefix="flashpatch-capture-"))
    try:
        _print(measure(folder, wanted), wanted)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # all is said; vLLM's shutdown takes seconds


def measure(folder: Path, wanted: argparse.Namespace) -> dict[str, float]:
    from flashpatch.verify.probes.eagle import tiny

    os.environ.update({**tiny.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) - 1))
    tiny.HIDDEN, tiny.INNER, tiny.VOCAB, tiny.HEADS, tiny.KV_HEADS = (
        wanted.hidden,
        2 * wanted.hidden,
        2048,
        8,
        4,
    )
    tiny.target(folder / "target", seed=1, layers=wanted.layers)
    tiny.drafter(folder / "drafter")
    import flashpatch

    flashpatch.enable("eagle", strict=True, samples=str(folder / "queue"), arms=["2_1_3"])
    from vllm import LLM, SamplingParams

    from flashpatch.patches.eagle.vllm import capture

    llm = LLM(
        **tiny.engine_arguments(
            folder / "target",
            dtype=wanted.dtype,
            max_num_seqs=wanted.batch,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=256 << 20,
            speculative_config=dict(method="eagle", model=str(folder / "drafter"), num_speculative_tokens=2),
        )
    )
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    recorder = capture.capture_of(runner).recorder
    hook, steps, background = _Spent(), [0], _Background()
    recorder.step, recorder.finish = hook.around(recorder.step), hook.around(recorder.finish)
    schedule = core.scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        return schedule(*args, **kwargs)

    core.scheduler.schedule = counted
    prompts = [{"prompt_token_ids": [3 + (7 * n + i) % 2000 for i in range(16)]} for n in range(wanted.batch)]
    sampling = SamplingParams(temperature=0, max_tokens=wanted.tokens, ignore_eos=True, detokenize=False)

    def one(on: bool) -> tuple[float, float]:
        recorder.rate = 1.0 if on else 0.0
        began, busy = time.perf_counter(), time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began, time.process_time() - busy

    for on in (True, False, True):
        one(on)
    recorder.flush()
    hook.seconds = 0.0
    ratios, processor, captured = [], [], 0.0
    captured_steps = 0
    busy = background.seconds()
    for number in range(wanted.rounds):
        times: dict[bool, tuple[float, float]] = {}
        for on in (True, False) if number % 2 else (False, True):
            before = steps[0]
            times[on] = one(on)
            captured_steps += (steps[0] - before) if on else 0
        recorder.flush()
        captured += times[True][0]
        ratios.append(times[True][0] / times[False][0])
        processor.append(times[True][1] / times[False][1])
    return {
        "step_ms": 1e3 * captured / captured_steps,
        "hook_us_per_step": 1e6 * hook.seconds / captured_steps,
        "hook_share": hook.seconds / captured,
        "background_share": (background.seconds() - busy) / captured,
        **_middle("processor", processor),
        **_middle("ratio", ratios),
        "samples": recorder.counts["requests"],
        "lost": recorder.counts["lost"] + recorder.writer.counts["dropped"],
    }


def _middle(name: str, values: list[float]) -> dict[str, float]:
    """The median, and its 95 % interval by order statistics."""
    values, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return {name: statistics.median(values), f"{name}_low": values[low], f"{name}_high": values[high]}


class _Spent:
    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


class _Background:
    """Processor time of the two threads behind the engine's."""

    names = ("flashpatch-recorder", "flashpatch-ring")

    def seconds(self) -> float:
        total = 0.0
        for thread in threading.enumerate():
            if thread.name in self.names:
                fields = (
                    Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
                )
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total


def _print(found: dict[str, float], wanted: argparse.Namespace) -> None:
    from flashpatch.commands.report import Table, emit

    rows = [
        ("decode step, with the drafter", f"{found['step_ms']:.2f} ms"),
        (
            "hook on the engine's thread",
            f"{found['hook_us_per_step']:.0f} us a step, {found['hook_share']:.2%}",
        ),
        ("threads behind it", f"{found['background_share']:.2%} of the steps' time"),
        (
            "processor time, captured round over plain round",
            f"{found['processor']:.3f} (95 %: {found['processor_low']:.3f} to {found['processor_high']:.3f})",
        ),
        (
            "wall time, captured round over plain round",
            f"{found['ratio']:.3f} (95 %: {found['ratio_low']:.3f} to {found['ratio_high']:.3f})",
        ),
        ("samples, of which lost", f"{found['samples']:.0f}, {found['lost']:.0f}"),
    ]
    title = f"Capture at full rate: {wanted.layers} layers of {wanted.hidden}, batch {wanted.batch}"
    emit(found, [Table(title, ("what", "measured"), rows)], wanted.json)


if __name__ == "__main__":
    main()
