"""What rounding a trainer's weights on their way into an engine costs: time and memory, per precision.

    python benchmarks/quantize.py [--hidden 1024] [--inner 4096] [--layers 8] [--rounds 5]
    python benchmarks/quantize.py --engine 50M [--rounds 5] [--threads 1]     # whole updates of vLLM engines

With --engine, an engine per precision takes the same bf16 weights in the same rounds, in buckets; the peer is the
engine in bf16. Memory is the highest resident size during an update above that before it.

Without, only the arithmetic is timed. The peer, in the same rounds, is a plain bf16 copy of the same weights: what
an update costs at the least. A ratio of 3 says that rounding a model takes three times as long as copying it. Memory
is the highest resident size while one stream is consumed tensor by tensor, above that of the copy; in the largest
weight's float32 copies, since the stream holds one tensor at a time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import quick
import torch
from reload import Model, Worker
from reloading import models

from flashpatch.patches.fp8.calibration.profile_file import Profile
from flashpatch.patches.fp8.calibration.structure import Exchange
from flashpatch.patches.fp8.precision import quantize

PRECISIONS = ("bf16", "fp8_channel", "int8", "int8_weight_only")
Weights = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("hidden", 1024), ("inner", 4096), ("layers", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--engine", choices=[size.name for size in models.SIZES if not size.experts], help="size of a model"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    args = quick.parse(parser, hidden=64, inner=128, layers=2, rounds=1)
    if args.engine:
        _engines(args.engine, args.rounds, args.threads)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = _weights(args.hidden, args.inner, args.layers, device)
    profile = _profile(weights, args.layers)
    ways: dict[str, Callable[[], Iterator]] = {
        "bf16 copy": lambda: ((n, w.clone()) for n, w in weights.items())
    }
    for form in ("int8", "fp8"):
        for granularity in ("channel", "tensor"):
            ways[f"{form}, scale per {granularity}"] = lambda f=form, g=granularity: quantize.stream(
                weights.items(), f, g, chosen=lambda name, tensor: tensor.dim() == 2
            )
    ways["int8, smoothed"] = lambda: quantize.stream(weights.items(), "int8", profile=profile)
    times: dict[str, list[float]] = {name: [] for name in ways}
    memory = {name: _memory(way, device) for name, way in ways.items()}
    for _ in range(args.rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            _consume(way())
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    base = median(times["bf16 copy"])
    largest = 4 * max(w.numel() for w in weights.values())
    total = sum(w.numel() for w in weights.values())
    print(f"{total / 1e6:.0f} million weights on {device}, {torch.get_num_threads()} threads")
    print(f"{'':24}  time / copy  extra memory / largest weight in float32")
    for name in ways:
        extra = max(memory[name] - memory["bf16 copy"], 0) / largest
        print(f"{name:24}  {median(times[name]) / base:11.2f}  {extra:12.2f}")


def _engines(name: str, rounds: int, threads: int) -> None:
    """Print what an update of an engine in each precision costs, as ratios to one in bf16."""
    size = next(size for size in models.SIZES if size.name == name)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "model"
        models.write(size, folder)
        model = Model(size, folder, bucket=64 << 20, threads=threads)
        taken: dict[str, list[dict]] = {precision: [] for precision in PRECISIONS}
        workers: dict[str, Worker] = {}
        try:
            for precision in PRECISIONS:
                workers[precision] = Worker(
                    "ours", model, precision, quantization="bf16"
                )  # FLASHPATCH alone decides
            for number in range(rounds + 1):
                for precision, worker in workers.items():
                    result = worker("buckets")
                    if number:  # the first is not counted
                        taken[precision].append(result)
        finally:
            for worker in workers.values():
                worker.close()
    base = {key: median(run[key] for run in taken["bf16"]) for key in ("ms", "mb")}
    copy = size.parameters * 2 / 2**20
    print(f"{size.name}, {copy:.0f} MB in bf16, {threads} thread(s), an update in buckets of 64 MB")
    print(f"{'':18}  {'ms':>7}  time / bf16  {'extra MB':>8}  memory / bf16  memory / model in bf16")
    for precision, runs in taken.items():
        ms, mb = (median(run[key] for run in runs) for key in ("ms", "mb"))
        time_ratio, memory_ratio = ms / base["ms"], mb / base["mb"]
        print(
            f"{precision:18}  {ms:7.0f}  {time_ratio:11.2f}  {mb:8.0f}  {memory_ratio:13.2f}  {mb / copy:6.2f}"
        )


def _weights(hidden: int, inner: int, layers: int, device: str) -> Weights:
    made: Weights = {}
    for layer in range(layers):
        for name, shape in (("norm", (hidden,)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            made[f"l{layer}.{name}.weight"] = torch.randn(shape, dtype=torch.bfloat16, device=device)
    return made


def _profile(weights: Weights, layers: int) -> Profile:
    exchanges, smooth = [], {}
    for layer in range(layers):
        for producer, offset, consumer in (("norm", 0.0, "up"), ("up", None, "down")):
            exchanges.append(Exchange(f"l{layer}.{producer}", offset, (f"l{layer}.{consumer}",)))
            width = weights[f"l{layer}.{producer}.weight"].shape[0]
            smooth[f"l{layer}.{producer}"] = torch.rand(width) + 0.5
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    rounded = frozenset(name for name, w in weights.items() if w.dim() == 2)
    return Profile("int8", "channel", "", shapes, tuple(exchanges), smooth, rounded)


def _consume(stream: Iterator) -> None:
    for _name, tensor in stream:
        del tensor


def _memory(way: Callable[[], Iterator], device: str) -> int:
    """Bytes at the highest while the stream is consumed, above those before it."""
    _consume(way())  # what allocators keep is kept by now
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _consume(way())
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident size so far
    before = _resident("VmRSS")
    _consume(way())
    return max(_resident("VmHWM") - before, 0)


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


if __name__ == "__main__":
    main()
