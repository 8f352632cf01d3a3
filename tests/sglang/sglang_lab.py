"""Engines of these tests: each in a process of its own, on a tiny random model, with the stand-ins in place."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STANDINS = HERE / "standins"
sys.path.insert(0, str(HERE.parent / "vllm"))  # the laboratory's models need no vLLM

PATIENCE = 240.0
_OURS = ("FLASHPATCH", "SGLANG_", "STANDIN_", "VLLM_")

#: Keywords of every engine: small, eager, deterministic, without a tokenizer.
ENGINE: dict[str, Any] = dict(
    device="cpu",
    dtype="bfloat16",
    attention_backend="intel_amx",
    disable_cuda_graph=True,
    mem_fraction_static=0.5,
    max_total_tokens=4096,
    max_running_requests=4,
    grammar_backend="none",
    log_level="info",
    skip_server_warmup=True,
    skip_tokenizer_init=True,
    random_seed=0,
)


def checkpoint(root: Path, family: str, seed: int) -> str:
    """A tiny random bf16 model on disk."""
    from lab import models

    return str(models.checkpoint(root, family, seed))


def int8_checkpoint(root: Path, family: str, seed: int) -> str:
    """The same model with its linear layers in int8, a scale per row, as w8a8_int8 wants it."""
    import torch
    from lab import models
    from safetensors.torch import save_file

    source = Path(checkpoint(root, family, seed))
    target = root / f"{source.name}-int8"
    if target.exists():
        return str(target)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {}
    for name, tensor in models.weights(source):
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True).clamp_min(1e-9) / 127
            tensors[name] = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="w8a8_int8", is_dynamic=True)
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


@dataclass
class Seen:
    """What a job left: the results of its steps, whether it came to its end, its log, its ledger."""

    steps: list[Any]
    done: bool
    log: str
    ledger: Path

    def __str__(self) -> str:
        return f"done={self.done}\n{self.log[-6000:]}"


def environment(folder: Path, flashpatch: str = "", **extra: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {
        **clean,
        "FLASHPATCH_LEDGER": str(folder / "ledger"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(STANDINS), str(HERE)]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **({"FLASHPATCH": flashpatch} if flashpatch else {}),
        **extra,
    }


def together(folder: Path, *jobs: dict[str, Any]) -> list[Seen]:
    """Run jobs side by side.

    Each is a dict: ``model``, ``steps``, ``flashpatch`` (the variable), ``env``; anything else is a keyword of
    the engine.
    """
    running = []
    try:
        for number, job in enumerate(jobs):
            where = folder / f"job{number}"
            where.mkdir(parents=True)
            running.append((where, _start(where, **job)))
        deadline = time.monotonic() + PATIENCE
        for _, process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
    finally:
        for _, process in running:
            _end(process)
    return [_read(where) for where, _ in running]


def run(folder: Path, **job: Any) -> Seen:
    """Run one job."""
    return together(folder, job)[0]


def _start(
    where: Path, model: str, steps: Sequence[Any], flashpatch: str = "", env: dict[str, str] | None = None, **engine: Any
) -> subprocess.Popen[bytes]:
    steps = [[step, {}] if isinstance(step, str) else list(step) for step in steps]
    (where / "job.json").write_text(json.dumps(dict(engine={**ENGINE, "model_path": model, **engine}, steps=steps)))
    with (where / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(HERE / "sglang_job.py"), str(where)],
            env=environment(where, flashpatch, **(env or {})),
            cwd=where,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a job and of its children, which are all in a session of their own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _read(where: Path) -> Seen:
    seen = json.loads((where / "seen.json").read_text()) if (where / "seen.json").exists() else {}
    log = (where / "log").read_text(errors="replace")
    return Seen(seen.get("steps", []), seen.get("done", False), log, where / "ledger")


def rows(seen: Seen) -> list[dict[str, Any]]:
    """The rows that the job's processes wrote."""
    return [json.loads(path.read_text()) for path in seen.ledger.rglob("row*.json")]
