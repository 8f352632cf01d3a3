"""What FlowRL's loss costs beside GRPO's with a reference: time and peak memory of verl's ``update_actor``.

    python benchmarks/flowrl.py [--steps N] [--model DIRECTORY] [--json]

Both are stepped by verl's own worker and FSDP engine on the same model and batch, without Ray and rollouts,
which are the same for both, as is the reference's forward pass: its logprobs are in the batch. Times are
taken in one process, in turns; memory in a process of its own for each: on an accelerator torch's peak, else
the rise of the process's peak above what it held before its actor was built. Aim: within 1.02x each on a model of
135 million weights, such as the one that `examples/world` converts; without ``--model`` a random one of 9 million.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import quick

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
GRPO = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.001")
HIDDEN, LAYERS, VOCABULARY = 256, 8, 2048
ROWS, PROMPT, ANSWER = 8, 32, 64


def write_model(folder: Path) -> Path:
    """A model of some 9 million weights, to which the partition function adds 1.5 in a hundred; to a real one
    it adds less."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def worker(model: Path, flowrl: bool) -> Any:
    """verl's actor worker; stock verl's when not ``flowrl``."""
    import flashpatch
    from flashpatch.verify.probes.flowrl import tiny

    if flowrl:
        flashpatch.enable("flowrl")
    overrides = (
        f"{ACTOR}.optim.optimizer=AdamW",
        f"{ACTOR}.optim.lr=1e-5",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={ROWS // 2}",
    )
    return tiny.worker(tiny.recipe(model, *overrides, *(() if flowrl else GRPO)))


def batch() -> Any:
    """Two micro-batches of responses."""
    import torch

    from flashpatch.verify.probes.flowrl import tiny

    draw = torch.Generator().manual_seed(0)
    rows = []
    for at in range(ROWS):
        ids = torch.randint(1, VOCABULARY, (PROMPT + ANSWER,), generator=draw).tolist()
        logp = [-8.3] * ANSWER
        rows.append(tiny.Response(ids[:PROMPT], ids[PROMPT:], logp, logp, 1.0 - 2 * (at % 2)))
    return tiny.batch(rows)


def prepare() -> None:
    """Where there is no accelerator, the family ``cpu`` makes one."""
    import torch

    import flashpatch

    if torch.accelerator.current_accelerator(check_available=True) is None:
        flashpatch.enable("cpu", "bf16")


def times(model: Path, steps: int) -> dict[str, list[float]]:
    """Seconds per update of each, in turns."""
    prepare()
    actors = {"grpo": worker(model, False), "flowrl": worker(model, True)}
    seconds: dict[str, list[float]] = {name: [] for name in actors}
    for step in range(steps + 1):
        for name, actor in actors.items() if step % 2 else reversed(actors.items()):
            data = batch()
            began = time.process_time() if _cpu() else time.perf_counter()
            actor.update_actor(data)
            _synchronize()
            ended = time.process_time() if _cpu() else time.perf_counter()
            if step:  # the first warms up
                seconds[name].append(ended - began)
    return seconds


def memory(model: Path, flowrl: bool) -> int:
    """Bytes at the peak of two updates above what the process held before its actor was built."""
    import torch

    prepare()
    import verl.workers.engine_workers  # noqa: F401

    data = batch()
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    actor = worker(model, flowrl)
    for _ in range(2):
        actor.update_actor(data.clone())
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def _cpu() -> bool:
    """Without accelerator the processor's own time is taken, which neighbours do not lengthen."""
    import torch

    return not torch.cuda.is_available()


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def child(job: str, model: Path, steps: int) -> Any:
    """The result of one job in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
        environment |= {
            "DIST_INIT_METHOD": f"file://{folder}/meet",
            "FLASHPATCH_LEDGER": f"{folder}/ledger",
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, __file__, "--job", job, "--model", str(model), "--steps", str(steps)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", choices=("times", "grpo", "flowrl"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="a checkpoint to measure on; without, a small random one")
    chosen = quick.parse(parser, steps=2)
    if chosen.job == "times":
        print(json.dumps(times(chosen.model, chosen.steps)))
        return
    if chosen.job:
        print(json.dumps(memory(chosen.model, chosen.job == "flowrl")))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or write_model(Path(folder) / "model")
        seconds = child("times", model, chosen.steps)
        peaks = {name: child(name, model, chosen.steps) for name in ("grpo", "flowrl")}
    pairs = [flow / grpo for flow, grpo in zip(seconds["flowrl"], seconds["grpo"], strict=True)]
    result = {
        "time_ratio": statistics.median(pairs),
        "memory_ratio": peaks["flowrl"] / peaks["grpo"],
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "bytes": peaks,
    }
    if chosen.json:
        print(json.dumps(result))
        return
    for name in ("grpo", "flowrl"):
        print(
            f"{name:7}{result['seconds'][name]:8.2f} s per update {peaks[name] / 2**20:8.0f} MiB at the peak"
        )
    print(
        f"ratio  {result['time_ratio']:8.3f}x             {result['memory_ratio']:8.3f}x   (aim: 1.02x each)"
    )


if __name__ == "__main__":
    main()
