"""How an update and the audit of a sync grow. The tensors are tiny, but for those whose bytes are what grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import bookkeeping
import torch

from flashpatch.patches._shared import fingerprint
from flashpatch.patches.fp8.refit.loader_adapter import LoaderAdapter
from flashpatch.patches.fp8.refit.managed_model import ManagedModel
from flashpatch.patches.fsdp import fingerprints as compare

Timed = Callable[[], object]
ROWS = 2


class Dense(torch.nn.Module):
    """``layers`` linear layers without bias, and a loader that finds parameters by name."""

    def __init__(self, layers: int, width: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, ROWS, bias=False, dtype=torch.bfloat16) for _ in range(layers)
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor into the parameter of its name."""
        params = dict(self.named_parameters())
        for name, tensor in weights:
            params[name].data.copy_(tensor)


def _opened(layers: int, width: int = 4) -> tuple[Dense, ManagedModel, list[tuple[str, torch.Tensor]]]:
    model = Dense(layers, width).requires_grad_(False)
    adapter = LoaderAdapter(torch.device("cpu"), lambda module: None, lambda module: False, nullcontext)
    managed = ManagedModel(model, adapter, {"atomic": "layer", "partial": False, "in_flight": "keep"})
    weights = [(name, torch.ones_like(tensor)) for name, tensor in model.named_parameters()]
    managed.load(model.load_weights, weights)
    managed.end_first_load()
    return model, managed, weights


def _update(layers: int, width: int = 4, buckets: int = 1) -> Timed:
    model, managed, weights = _opened(layers, width)

    def update() -> None:
        for number in range(buckets):
            bucket = weights[len(weights) * number // buckets : len(weights) * (number + 1) // buckets]
            managed.load(model.load_weights, bucket)
        managed.finish()

    return update


def update_by_layers(layers: int) -> Timed:
    """One update in one call, of so many layers of one tensor."""
    return _update(layers)


def update_by_experts(experts: int) -> Timed:
    """One update of one layer that takes three tensors for each of so many experts."""
    _, update = bookkeeping.opened(experts)
    weights = bookkeeping.checkpoint(experts, 1)
    return lambda: update(weights)


def update_by_bytes(values: int) -> Timed:
    """One update in one call, of 16 tensors that hold so many values."""
    return _update(16, values // 16 // ROWS)


def update_by_buckets(buckets: int) -> Timed:
    """One update of 512 layers in so many calls."""
    return _update(512, buckets=buckets)


def opening(layers: int) -> Timed:
    """Begin to follow a model of so many layers, as when an engine is opened."""
    model = Dense(layers)
    adapter = LoaderAdapter(torch.device("cpu"), lambda module: None, lambda module: False, nullcontext)
    return lambda: ManagedModel(model, adapter, {"atomic": "layer", "partial": False, "in_flight": "keep"})


def fingerprints(values: int) -> Timed:
    """Fingerprint of one bf16 tensor of so many values."""
    tensor = torch.zeros(values, dtype=torch.bfloat16)
    return lambda: fingerprint.of(tensor)


def _seen(tensors: int, start: int) -> dict[str, compare.Seen]:
    return {f"layer.{i}": compare.Seen((2, 4), "torch.bfloat16", (start + i, i)) for i in range(tensors)}


def compared(tensors: int) -> Timed:
    """The engine's comparison of what arrived, where all of it is right."""
    sent = _seen(tensors, 0)
    arrived = dict(sent)
    return lambda: compare.differences(sent, arrived)


def compared_wrong(tensors: int) -> Timed:
    """The same where all of it is wrong."""
    sent, arrived = _seen(tensors, 0), _seen(tensors, tensors)
    return lambda: compare.differences(sent, arrived)


def trainers_table(tensors: int, replicas: int = 1) -> Timed:
    """The trainer's fingerprints of so many tensors, put together for the message; nothing is sent."""
    import verl.utils.model  # noqa: F401  not within what is timed

    from flashpatch.patches.fsdp.trainer import ShardFingerprints

    mesh = SimpleNamespace(
        ndim=2, size=lambda dim=None: 1 if dim is None else replicas, get_local_rank=lambda dim: 0
    )
    model = Dense(tensors)
    for tensor in model.parameters():
        torch.nn.init.zeros_(tensor)  # fingerprints of the other replicas are 0 too, as none is there

    def follow() -> None:
        with ShardFingerprints(
            SimpleNamespace(module=model, device_mesh=mesh), "report", False, False
        ) as account:
            for name, tensor in model.named_parameters():
                account.add(name, tensor)
            account.table()

    return follow


def trainers_replicas(replicas: int) -> Timed:
    """The same of 256 tensors in a mesh with so many replicas of the model."""
    return trainers_table(256, replicas)


PARTS: dict[str, tuple[str, Callable[[int], Timed], float]] = {
    "engine opened": ("layers", opening, 1),
    "update": ("layers", update_by_layers, 1),
    "update, experts": ("experts of a layer", update_by_experts, 1),
    "update, values": ("bf16 values", update_by_bytes, 1),
    "update, buckets": ("buckets of 512 layers", update_by_buckets, 1),
    "audit: fingerprint": ("bf16 values", fingerprints, 1),
    "audit: engine compares": ("tensors", compared, 1),
    "audit: all differ": ("tensors", compared_wrong, 1),
}
"""Part -> what grows, its timing at a size, and the exponent of its work."""
if find_spec("verl") is not None:
    PARTS["audit: trainer's table"] = ("tensors", trainers_table, 1)
    PARTS["audit: replicas"] = ("replicas", trainers_replicas, 1)
