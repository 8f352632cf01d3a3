"""Engines of these tests: each in processes of its own, on a tiny random model, with the stand-ins in place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import warm
from installed import version_of
from machine import limit

HERE = Path(__file__).resolve().parent
STANDINS = HERE / "sglang_standins"

VERSION = version_of("sglang").release[:3]
OLD = VERSION < (0, 5, 21)
"""Whether the installed SGLang is of the generation without update sessions."""
FRAMEWORK = "sglang_0_5_12" if OLD else "sglang"
"""As in the ids of the patches for it."""

#: What a forked job finds imported; the stand-in for AMX comes before SGLang.
IMPORTED = (
    *("amx_standin", "sglang", "sglang.srt.entrypoints.engine", "sglang.srt.managers.detokenizer_manager"),
    *("sglang.srt.managers.scheduler", "sglang.srt.model_executor.model_runner"),
    "sglang.srt.models.registry",  # and with it every model
    "sglang.srt.speculative.eagle_worker_v2",
)
#: A forked job. SGLang would start its processes afresh, and each would import everything again. FlashPatch comes last, as with
#: a user's ``flashpatch.enable``.
FORKED = """
import multiprocessing, os, sys
from pathlib import Path
multiprocessing.set_start_method("fork", force=True)
multiprocessing.set_start_method = lambda *args, **kwargs: None
import sglang_job
if sys.argv[2]:
    os.environ["FLASHPATCH"] = sys.argv[2]
from flashpatch import bootstrap
bootstrap.start()
sglang_job.main(Path(sys.argv[1]))
"""

TIMEOUT = limit(420)
_OURS = ("FLASHPATCH", "SGLANG_", "STANDIN_", "VLLM_")

#: Keywords of every engine: small, eager, deterministic, without a tokenizer.
ENGINE: dict[str, Any] = dict(
    mem_fraction_static=0.95,  # other processes take memory while an engine starts
    **dict(device="cpu", dtype="bfloat16", attention_backend="intel_amx", disable_cuda_graph=True),
    **dict(max_total_tokens=4096, max_running_requests=4, grammar_backend="none", log_level="info"),
    **dict(skip_server_warmup=True, skip_tokenizer_init=True, random_seed=0),
)


def checkpoint(root: Path, family: str, seed: int, **overrides: Any) -> str:
    """A tiny random bf16 model on disk; ``overrides`` change its configuration."""
    from vllm_lab import models

    return str(models.checkpoint(root, family, seed, **overrides))


def int8_checkpoint(root: Path, family: str, seed: int) -> str:
    """The same model with its linear layers in int8, a scale per row, as w8a8_int8 wants it."""
    import torch
    from vllm_lab import models

    source, tensors = Path(checkpoint(root, family, seed)), {}
    for name, tensor in models.weights(source):
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True).clamp_min(1e-9) / 127
            tensors[name] = (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = tensor
    with models.making(root / f"{source.name}-int8") as (target, work):
        if work is not None:
            models.write_changed(work, source, tensors)
            config = json.loads((work / "config.json").read_text())
            config["quantization_config"] = dict(quant_method="w8a8_int8", is_dynamic=True)
            (work / "config.json").write_text(json.dumps(config))
    return str(target)


@dataclass
class Seen:
    """What a job left: the results of its steps, whether it came to its end, its log, its folder."""

    steps: list[Any]
    done: bool
    log: str
    where: Path

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

    Each is a dict: ``model``, ``steps``, ``flashpatch`` (the variable), ``options`` (family to its options),
    ``env``, ``fresh`` (processes started as a user's are, not forked); anything else is a keyword of the engine."""
    running: list[_Running | _Fresh] = []
    try:
        for number, job in enumerate(jobs):
            where = folder / f"job{number}"
            where.mkdir(parents=True)
            running.append(_start(where, **job))
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline and not all(one.ended for one in running):
            time.sleep(0.1)
    finally:
        for one in running:
            one.end()
    return [_read(one.where) for one in running]


def run(folder: Path, **job: Any) -> Seen:
    """Run one job."""
    return together(folder, job)[0]


def bare(folder: Path, *steps: Any, **job: Any) -> Seen:
    """Steps that need SGLang and no engine."""
    return run(folder, model="", steps=steps, bare=True, **job)


def _start(
    where: Path,
    model: str,
    steps: Sequence[Any],
    flashpatch: str = "",
    options: dict[str, dict[str, Any]] | None = None,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    bare: bool = False,
    **engine: Any,
) -> _Running | _Fresh:
    """``options`` go into a flashpatch.toml beside the job; ``{where}`` in them is its folder."""
    lines = []
    for family, values in (options or {}).items():
        lines += [f"[{family}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    if lines:
        (where / "flashpatch.toml").write_text("\n".join([*lines, ""]).replace("{where}", str(where)))
    steps = [[step, {}] if isinstance(step, str) else list(step) for step in steps]
    (where / "job.json").write_text(
        json.dumps(dict(engine={**ENGINE, "model_path": model, **engine}, steps=steps, bare=bare))
    )
    environ = environment(where, "" if not fresh else flashpatch, **(env or {}))
    with (where / "log").open("wb") as log, open(os.devnull) as nothing:
        given = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
        if fresh:
            return _Fresh(where, environ, log)
        command = ["-c", FORKED, where, flashpatch]
        paths = [STANDINS, HERE]
        process = warm.start(IMPORTED, command, env=environ, cwd=where, descriptors=given, path=paths)
        return _Running(where, process)


class _Running:
    """A job in a process that was forked from one that has imported SGLang."""

    def __init__(self, where: Path, process: warm.Process) -> None:
        self.where, self._process = where, process

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """End what is left of the job and of its children, which are all in a session of their own."""
        self._process.kill()


class _Fresh:
    """A job in an interpreter of its own."""

    def __init__(self, where: Path, environ: dict[str, str], log: IO[bytes]) -> None:
        self.where = where
        script = [sys.executable, str(HERE / "sglang_job.py"), str(where)]
        streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._process = subprocess.Popen(script, env=environ, cwd=where, start_new_session=True, **streams)

    @property
    def ended(self) -> bool:
        # It stays a zombie until `end`, so that its number becomes nobody else's.
        return bool(os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def end(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def _read(where: Path) -> Seen:
    seen = json.loads((where / "seen.json").read_text()) if (where / "seen.json").exists() else {}
    log = (where / "log").read_text(errors="replace")
    return Seen(seen.get("steps", []), seen.get("done", False), log, where)


def rows(seen: Seen) -> list[dict[str, Any]]:
    """The rows that the job's processes wrote."""
    return [json.loads(path.read_text()) for path in (seen.where / "ledger").rglob("row*.json")]
