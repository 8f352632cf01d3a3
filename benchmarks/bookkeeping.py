"""What following each write of an update costs, for a mixture of experts: processor milliseconds per layer and update;
and, if vLLM is installed, what the key of the prefix cache costs a request.

    python benchmarks/bookkeeping.py [--experts 8 128 384] [--prompts 512 8192] [--rounds 20] [--threads 1] [--json]

A layer of toy experts (w1, w2 and w3 of 16 x 8 elements each, loaded one by one into two fused parameters, as vLLM
loads them) is updated through the transaction. "plain" loads the same tensors into the same parameters with nothing
around; "bookkeeping" is what the update takes beyond that, and "per write" is that by tensor. The least of several
rounds in which the two take turns, as other work on the machine only adds. The values are tiny, so that next to no time
goes into copying. Torch calls Python for each operator of a loader, of which there are three to four per write; that
alone, where no parameter is followed, is "floor": it bounds what any way of following writes by operators can reach. Both
are also given as ratios to "plain", which say more on a busy machine.

A request's blocks are hashed and it is admitted (`prefix_key_cost.py`) by vLLM's functions as they are, "stock", and as
`in_flight="keep"` has them, "keyed", in turns; "commit" is the change of the key while 64 requests run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import prefix_key_cost
import quick
import torch

from flashpatch.commands.report import Table, emit
from flashpatch.patches.fp8.refit.loader_adapter import LoaderAdapter
from flashpatch.patches.fp8.refit.managed_model import ManagedModel
from flashpatch.patches.fp8.refit.write_tracker import WriteTracker

INNER, HIDDEN = 16, 8
Named = tuple[str, torch.Tensor]


class Experts(torch.nn.Module):
    """Fused parameters ``w13`` [experts, 2 * INNER, HIDDEN] and ``w2`` [experts, HIDDEN, INNER]."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w13 = torch.nn.Parameter(torch.zeros(experts, 2 * INNER, HIDDEN), requires_grad=False)
        self.w2 = torch.nn.Parameter(torch.zeros(experts, HIDDEN, INNER), requires_grad=False)


class Model(torch.nn.Module):
    """A model of one such layer."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.mlp = Experts(experts)

    def load_weights(self, weights: Iterable[Named]) -> set[str]:
        """Load tensors named ``<expert>.<shard>``."""
        params = dict(self.named_parameters())
        for name, tensor in weights:
            expert, shard = name.split(".")
            param = params["mlp.w2" if shard == "w2" else "mlp.w13"]
            place = param.data[int(expert)]
            if shard != "w2":
                place = place.narrow(0, INNER * (shard == "w3"), INNER)
            place.copy_(tensor)
        return set(params)


def checkpoint(experts: int, seed: int) -> list[Named]:
    """Name and tensor of every expert's shards."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
    return [
        (f"{expert}.{shard}", torch.randn(shape, generator=random))
        for expert in range(experts)
        for shard, shape in shapes.items()
    ]


def opened(experts: int, atomic: str = "layer") -> tuple[Model, Callable[[Iterable[Named]], None]]:
    """A model on its first checkpoint, and the function that updates it."""
    model = Model(experts)
    adapter = LoaderAdapter(torch.device("cpu"), lambda module: None, lambda module: False, nullcontext)
    managed = ManagedModel(model, adapter, {"atomic": atomic, "partial": False, "in_flight": "keep"})
    managed.load(model.load_weights, checkpoint(experts, 0))
    managed.end_first_load()

    def update(weights: Iterable[Named]) -> None:
        managed.load(model.load_weights, weights)
        managed.finish()

    return model, update


def measure(experts: int, rounds: int) -> dict[str, float]:
    """Milliseconds of one layer's load: plain, updated, and what the update takes beyond."""
    bare, (model, update) = Model(experts), opened(experts)

    def followed(weights: Iterable[Named]) -> None:
        with WriteTracker({}, lambda param, view: None):
            bare.load_weights(weights)

    took: dict[str, list[float]] = {"plain": [], "floor": [], "update": []}
    for number in range(rounds + 1):
        weights = checkpoint(experts, number)
        for way, load in (("plain", bare.load_weights), ("floor", followed), ("update", update)):
            start = time.process_time()
            load(weights)
            took[way].append(1e3 * (time.process_time() - start))
        for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
            assert torch.equal(mine, other), "the update has not brought what the plain load has"
    found = {way: min(times[1:]) for way, times in took.items()}
    return {**found, "bookkeeping": found["update"] - found["plain"]}


def main() -> None:
    """Measure each number of experts and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 128, 384])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = quick.parse(parser, experts=[8], prompts=[512], rounds=2)
    torch.set_num_threads(args.threads)
    found = {experts: measure(experts, args.rounds) for experts in args.experts}
    rows = [
        (
            str(experts),
            *(f"{times[way]:.1f}" for way in ("plain", "floor", "update", "bookkeeping")),
            f"{1e3 * times['bookkeeping'] / (3 * experts):.1f}",
            *(f"{times[way] / times['plain']:.1f}" for way in ("floor", "update")),
        )
        for experts, times in found.items()
    ]
    columns = (
        "experts",
        "plain ms",
        "floor ms",
        "update ms",
        "bookkeeping ms",
        "per write us",
        "floor / plain",
        "update / plain",
    )
    tables = [Table("One layer of experts, one update", columns, rows)]
    requests = prefix_key_cost.measure(args.prompts, args.rounds)
    if requests:
        tables.append(prefix_key_cost.table(requests))
    emit({"experts": found, "prompts": requests}, tables, args.json)


if __name__ == "__main__":
    main()
