"""Log-probabilities from hidden states: blocks, verl's fused kernel, verl's unfused path, Liger where
installed.

    python benchmarks/logprobs.py [--tokens 512] [--hidden 512] [--vocabulary 151936] [--dtype float32]
    [--repeats 3]

Forward and backward of each, in turns, in one process per path, on the CPU or, where there is one, the CUDA
device. Peak memory is what the call needs above what it was given (resident size; CUDA: the allocator's).
Aims: at most 1/4 of the unfused path's memory, and no slower.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec
from statistics import median

import quick

from flashpatch.commands.report import Table, emit

PATHS = ("ours", "verl unfused", "verl fused", "liger")
AIMS = {"memory": 0.25, "time": 1.0}


def path(name: str):
    """A function of hidden states, head and labels that gives log-probabilities."""
    if name == "ours":
        from flashpatch.patches.grpo.loss.logprobs import token_logprobs

        return lambda hidden, head, labels: token_logprobs(hidden, head, labels).logprobs
    if name == "verl unfused":
        from verl.utils.torch_functional import logprobs_from_logits

        return lambda hidden, head, labels: logprobs_from_logits(hidden @ head.t(), labels)
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    fused = FusedLinearForPPO(impl_backend="liger" if name == "liger" else "torch")
    return lambda hidden, head, labels: fused(hidden, head, labels)[0]


def worker(given: argparse.Namespace) -> None:
    """Measure on request, one JSON line per round: ms, MB; and how far the numbers are from float64."""
    import torch
    from reloading.counter import measure

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dtype = getattr(torch, given.dtype)
    hidden = torch.randn(given.tokens, given.hidden, dtype=dtype, device=device, requires_grad=True)
    head = (
        (torch.randn(given.vocabulary, given.hidden, device=device) * given.hidden**-0.5)
        .to(dtype)
        .requires_grad_()
    )
    labels = torch.randint(0, given.vocabulary, (given.tokens,), device=device)
    weights = torch.randn(given.tokens, device=device)
    function, found = path(given.worker), {}

    def work() -> None:
        logprobs = function(hidden, head, labels)
        (logprobs * weights).sum().backward()
        found["logprobs"] = logprobs.detach()
        if device == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad():
        few = slice(0, 16)
        exact = torch.log_softmax(hidden[few].double() @ head.double().t(), -1).gather(1, labels[few, None])[
            :, 0
        ]
    for _ in sys.stdin:
        # Gradients are outputs: they are there before, and are not counted.
        for parameter in (hidden, head):
            parameter.grad = torch.zeros_like(parameter)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        figures = measure(work)
        if device == "cuda":
            figures["mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        away = (found["logprobs"][few].double() - exact).abs().max().item()
        print(json.dumps({"ms": figures["ms"], "mb": figures["mb"], "away": away}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=PATHS, help=argparse.SUPPRESS)
    given = quick.parse(parser, tokens=32, hidden=32, vocabulary=1000, repeats=1)
    if given.worker:
        return worker(given)
    absent = {"liger": "liger_kernel"} if find_spec("liger_kernel") is None else {}
    if find_spec("verl") is None:
        absent |= {name: "verl" for name in PATHS[1:]}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in PATHS if name not in absent}
    sizes = [f"--{name}={getattr(given, name)}" for name in ("tokens", "hidden", "vocabulary", "dtype")]
    workers = {
        name: subprocess.Popen(
            [sys.executable, __file__, *sizes, "--worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name in taken
    }
    for turn in range(given.repeats + 1):
        for name, process in workers.items():
            process.stdin.write("go\n")
            process.stdin.flush()
            figures = json.loads(process.stdout.readline())
            if turn:  # the first one warms up
                taken[name].append(figures)
    for process in workers.values():
        process.stdin.close()
        process.wait()
    middle = {
        name: {key: median(one[key] for one in runs) for key in runs[0]} for name, runs in taken.items()
    }
    ours = middle["ours"]
    rows = [
        [
            name,
            f"{one['ms']:.0f}",
            f"{one['mb']:.0f}",
            f"{one['away']:.0e}",
            f"{ours['ms'] / one['ms']:.2f}",
            f"{ours['mb'] / max(one['mb'], 1e-9):.2f}",
        ]
        for name, one in middle.items()
    ]
    title = f"{given.tokens} tokens, hidden {given.hidden}, vocabulary {given.vocabulary}, {given.dtype}"
    columns = ["path", "ms", "MB extra", "from float64", "ours / it: time", "memory"]
    emit({"medians": middle, "runs": taken}, [Table(title, columns, rows)], given.json)
    if not given.json:
        for name, package in absent.items():
            print(f"{name} left out: {package} is not installed")
        if peer := middle.get("verl unfused"):
            ratios = {"memory": ours["mb"] / peer["mb"], "time": ours["ms"] / peer["ms"]}
            for name, aim in AIMS.items():
                word = "met" if ratios[name] <= aim else "MISSED"
                print(f"aim {name} / verl unfused <= {aim}: {ratios[name]:.3f}, {word}")


if __name__ == "__main__":
    main()
