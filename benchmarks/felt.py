"""What a GPU would feel, counted: per step of an engine and per update, with each name on and without.

    python benchmarks/felt.py [--quick] [--only ROW,ROW...] [--batches 1,64,256] [--steps 48] [--json]

Needs vLLM's CUDA wheel, on a GPU or on the fake device of tests/support/fake_cuda (`make test-cuda-0.24` sets it up). Each row
is an engine with random weights. Counted are calls of Python, operators launched on the device, host waits, and bytes asked of
torch's allocators; they are the same in every run. The time of the engine's thread in FlashPatch's own code (Python 3.12) is the
median over the steps, by the clock: other work on the machine lengthens it, and on the fake device what operators take. An update's
passes are the bytes that operators were given or gave, over those of the weights that came."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quick

import flashpatch
from flashpatch.commands.report import Table, emit

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parent / "tests" / "support"
sys.path.append(str(SUPPORT))
STEPS = {"off": ("off", "bf16"), "off, fp8": ("off", "fp8")}  # FlashPatch's name, and the engine's precision
STEPS |= {name: (name, "fp8" if name == "fp8" else "bf16") for name in ("bf16", "fp8", "eagle", "grpo")}
UPDATES = [f"{model} {form}" for model in ("7B", "moe", "28") for form in ("bf16", "fp8", "int8")]
UPDATES += ["7B bf16 atomic", "7B fp8 atomic", "experts bf16", "experts fp8"]
MIB = 1 << 20
QUICK = "steps:off,steps:bf16,steps:eagle,update:7B bf16,update:7B int8,update:experts bf16,sync"
OWN = {"bf16": 40, "fp8": 40, "eagle": 140, "grpo": 0}
"""Most calls of Python of FlashPatch's own in a step of 256 requests or fewer."""
ROUNDING = 100 * MIB
"""What rounding to int8 may take: half of what the largest tensor has in bf16, and a block of 32 MiB in float32."""
CAPTURED = 3
"""Launches that capture may add to a step."""
OVER = {"bf16": 2.5, "fp8": 2.8, "int8": 5.1}
"""Most launches of an update, in any buckets, over those of vLLM's own reload, which has no check for
NaN, measures no error of rounding, and gets int8 rounded already. Memory that a loader writes is first filled with NaN, so that no
row is served that nobody wrote: one launch for each weight and scale."""
OVER_EXPERTS = {"bf16": 1.1, "fp8": 1.1, "int8": 5.0}
"""The same of experts, whose loaders copy each by itself."""
SYNCED = {"audit": 5.6, "delta, 1% changed": 5.2}
"""Most passes over what is synced."""


def main() -> None:
    parser = quick.parser(__doc__)
    parser.add_argument("--only", default="", help="beginnings of rows, as steps:fp8,update:7B int8")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    wanted = quick.parse(parser, batches="64", steps=9, only=QUICK)
    if wanted.folder:
        _measure(wanted)
        return
    with tempfile.TemporaryDirectory(prefix="flashpatch-felt-") as folder:
        found = measured(Path(folder), sys.argv[1:])
    emit(found, [_steps(found), _updates(found), _syncs(found)], wanted.json)
    missed = _missed(found)
    if not wanted.json:
        print(f"{len(missed)} aims missed{':' if missed else ''}", *missed, sep="\n")


def _missed(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return in words what is more than it may be."""
    missed = []

    def judge(what: str, value: float, most: float) -> None:
        if value > most:
            missed.append(f"{what}: {value:g}, at most {most:g}")

    for name, (on, precision) in STEPS.items():
        stock = found.get("steps:off" if precision == "bf16" else "steps:off, fp8")
        for kind, one in found.get(f"steps:{name}", {}).items() if stock and on != "off" else ():
            if kind == "lost":
                judge(f"{name}: requests lost", one, 0)
                continue
            more = CAPTURED if on == "eagle" else 0
            judge(f"{name}, {kind}: launches", one["launches"], stock[kind]["launches"] + more)
            judge(f"{name}, {kind}: waits", one["waits"], stock[kind]["waits"])
            judge(f"{name}, {kind}: calls", one["calls"], OWN[on])
    for title in UPDATES:
        ours, reload = found.get(f"update:{title}"), found.get(f"update:{title}, stock", {}).get("reload")
        model, precision = title.split()[:2]
        over = OVER_EXPERTS if model in ("moe", "experts") else OVER
        for way, one in ours.items() if ours and reload else ():
            if way == "sizes":
                continue
            judge(f"{title}, {way}: launches", one["launches"], over[precision] * reload["launches"])
            judge(f"{title}, {way}: held after it", one["held"], 0)
            extra = ROUNDING if precision == "int8" else 16 * MIB
            # A layer that two buckets share is whole at the end of the second, in which the next one has begun.
            layers = 1 if over is OVER or way == "one call" else 2
            most = max(1.01 * reload["peak"], layers * ours["sizes"]["layer"] + extra)
            judge(f"{title}, {way}: peak", one["peak"], most)
            if model in ("28", "experts"):
                judge(f"{title}, {way}: calls", one["calls"], reload["calls"])
    for what, one in found.get("sync", {}).items():
        judge(f"{what}: peak over its size", one["peak"], 1.1)
        judge(f"{what}: passes", one["passes"], SYNCED.get(what, 35))
    return missed


def measured(folder: Path, arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Return by row what a process on the device, fake if there is one, has counted.

    Args:
        folder: for what the process writes.
        arguments: of this command."""
    from cuda_lab import runs

    env = runs.environment(90 if runs.is_built() else 0, FAKE_CUDA_MIB="12288")
    env |= {"PYTHONPATH": str(SUPPORT), "FLASHPATCH_LEDGER": str(folder / "ledger")}
    command = [sys.executable, __file__, *arguments, "--folder", str(folder)]
    found = {}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("{"):
                found |= json.loads(line)
    if process.returncode:
        raise SystemExit(f"the process that measures ended with status {process.returncode}")
    return found


def _measure(wanted: argparse.Namespace) -> None:
    from felting import steps, syncs, updates
    from vllm.distributed import cleanup_dist_env_and_memory

    def row(title: str, name: str, measure: Callable[..., dict], *arguments: Any, **options: Any) -> None:
        only = wanted.only.split(",")
        if not any(title.startswith(one) for one in only):
            return
        if name != "off":
            flashpatch.enable(name, strict=True, **options)
        print(json.dumps({title: measure(wanted.folder, *arguments)}), flush=True)
        print(title, file=sys.stderr, flush=True)
        cleanup_dist_env_and_memory()
        if name != "off":
            flashpatch.disable(name)

    batches = [int(one) for one in wanted.batches.split(",")]
    for name, (on, precision) in STEPS.items():
        options = {"samples": str(wanted.folder / "samples")} if on == "eagle" else {}
        row(f"steps:{name}", on, steps.measured, precision, batches, wanted.steps, **options)
    for title in UPDATES:
        model, precision, *atomic = title.split()
        size = "half" if wanted.quick and model == "7B" else model
        if not atomic:
            row(f"update:{title}, stock", "off", updates.measured, size, precision, False)
        options = {"atomic": "model" if atomic else "layer"}
        row(f"update:{title}", precision, updates.measured, size, precision, True, **options)
    row("sync", "off", syncs.measured)
    sys.stdout.flush()
    os._exit(0)  # destructors of CUDA libraries find no device


def _steps(found: dict[str, dict[str, Any]]) -> Table:
    rows = [
        (
            f"{row.removeprefix('steps:')}, {kind}",
            *(f"{one[key]:.0f}" for key in ("us", "least", "calls", "launches", "waits", "device", "pinned")),
            *(f"{one[key]:.0f}" for key in ("behind", "wall")),
        )
        for row, kinds in found.items()
        if row.startswith("steps:")
        for kind, one in kinds.items()
        if isinstance(one, dict)
    ]
    columns = "step;us own;least;calls own;launches;waits;device bytes;pinned bytes;us behind;us a step"
    return Table("Per step of the engine's thread", columns.split(";"), rows)


def _updates(found: dict[str, dict[str, Any]]) -> Table:
    rows = []
    for row, ways in found.items():
        if not row.startswith("update:"):
            continue
        sizes = ways["sizes"]
        for way, one in ways.items():
            if way != "sizes":
                mib = [f"{one[key] / MIB:.1f}" for key in ("peak", "held", "reserved", "host")]
                passes = f"{one['touched'] / sizes['sent']:.2f}"
                cells = (
                    str(one["launches"]),
                    str(one["waits"]),
                    passes,
                    *mib,
                    str(one["calls"]),
                    *(f"{one[key]:.1f}" for key in ("ms", "wall")),
                )
                rows.append((f"{row.removeprefix('update:')}, {way}", *cells))
    columns = (
        "update, launches, waits, passes, peak MiB, held, reserved, host MiB, Python calls, processor ms, ms"
    )
    return Table("Per update; MiB above the model and what came", columns.split(", "), rows)


def _syncs(found: dict[str, dict[str, Any]]) -> Table:
    rows = [
        (
            what,
            str(one["launches"]),
            str(one["waits"]),
            *(f"{one[key]:.2f}" for key in ("passes", "peak", "wall")),
        )
        for what, one in found.get("sync", {}).items()
    ]
    columns = "128 MiB of bf16;launches;waits;passes;peak over its size;ms"
    return Table("Per sync, on the trainer's device", columns.split(";"), rows)


if __name__ == "__main__":
    main()
