"""Join what the ranks of tensor parallelism saw into what one process would have seen."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashpatch.verify.exact.calls import Call
from flashpatch.verify.exact.certificate import Place

AGREE = 2.0**-8
"""Ranks that hold the same agree to that part of the norm."""
HEAD = "logits_processor"

Parts = tuple[tuple[int, int], ...]
"""Of the columns, or heads, of one rank: how many (0: the rest), and how many neighbouring ranks have the same ones."""
REST: Parts = ((0, 1),)


@dataclass(frozen=True)
class Layout:
    """How what a module is given, or returns, lies on the ranks.

    The kind is "same" on each, "split" between them in these parts, parts of a "sum"; "heads", split if they are a dimension of
    their own; "either", the same or split; "unknown", the same or not to be joined."""

    kind: str = "unknown"
    parts: Parts = ()


UNKNOWN, SAME, SUM = Layout(), Layout("same"), Layout("sum")
Pair = tuple[Layout, Layout]
"""Of what a module is given, and of what it returns."""


@dataclass(frozen=True)
class Joined:
    """What one process would have seen, where ranks disagree, in the order of the calls, and the modules that cannot be joined."""

    calls: list[Call] = field(default_factory=list)
    apart: list[Place] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def some(ranks: Collection[int], of: int) -> str:
    """Name some of so many ranks: "" if they are all of them, or none."""
    if len(ranks) in (0, of):
        return ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def layouts_of(model: torch.nn.Module) -> dict[str, Pair]:
    """Return by name the layouts of the modules of one rank's model whose class says how they are split."""
    modules = dict(model.named_modules())
    # An adapter's layer computes what the layer does that it wraps.
    modules = {name: getattr(module, "base_layer", module) for name, module in modules.items()}
    found = {name: _layout(name, module, modules) for name, module in modules.items()}
    for module in modules.values():
        if hasattr(module, "shard_indices"):
            found[HEAD] = UNKNOWN, Layout("split", ((module.num_embeddings_per_partition, 1),))
    return {name: layouts for name, layouts in found.items() if layouts != (UNKNOWN, UNKNOWN)}


def _layout(name: str, module: Any, modules: Mapping[str, Any]) -> Pair:
    parent, _, last = name.rpartition(".")
    is_split = getattr(module, "tp_size", 1) > 1
    kind = type(module).__name__
    if "Norm" in kind and (is_split or "TP" in kind):
        return Layout("either", REST), Layout("either", REST)
    if "Norm" in kind and "Gated" not in kind:  # of queries and keys head by head
        beside = modules.get(f"{parent}.qkv_proj")
        copies = getattr(beside, "num_kv_head_replicas", 1) if last.startswith("k") else 1
        heads = Layout("heads", ((0, copies),))
        return heads, heads
    if hasattr(module, "shard_indices") or (hasattr(module, "output_partition_sizes") and not is_split):
        return SAME, SAME
    if hasattr(module, "input_is_parallel"):
        given = Layout("split", REST) if module.input_is_parallel else SAME
        return given, SAME if module.reduce_results else SUM
    if hasattr(module, "gather_output"):
        return SAME, SAME if module.gather_output else _columns(module, modules.get(parent))
    return UNKNOWN, UNKNOWN


def _columns(module: Any, parent: Any) -> Layout:
    widths = module.output_partition_sizes
    if len(widths) == 1 and hasattr(parent, "groups_ssm_state_size"):
        return UNKNOWN  # a mixer with fewer groups than ranks: each has its own order of columns
    of_keys = getattr(module, "num_kv_head_replicas", 1)
    copies = [1, *[of_keys] * (len(widths) - 1)]
    return Layout("split", tuple(zip(widths, copies, strict=True)))


def join(ranks: Sequence[Sequence[Call]], layouts: Mapping[str, Pair]) -> Joined:
    """Return what one process would have seen of the calls of each rank, which calls the same modules in the same order."""
    if len(ranks) == 1 or not ranks[0]:
        return Joined(list(ranks[0]))
    found, tokens = Joined(), len(ranks[0][0].returned)
    for calls in zip(*ranks, strict=True):
        name = calls[0].name
        given, returned = [call.given for call in calls], [call.returned for call in calls]
        layout = layouts.get(name, (UNKNOWN, UNKNOWN))
        if name == HEAD:  # the first rank has all columns
            ((width, _),) = layout[1].parts or REST
            columns = torch.arange(returned[0].shape[-1])
            found.calls.append(replace(calls[0], returned_by=columns // width if width else None))
            continue
        into, out = _resolved(layout[0], given, tokens), _resolved(layout[1], returned, tokens)
        if UNKNOWN in (into, out):
            found.left.append(name)
            continue
        found.apart.extend(Place(f"into {name}", size, AGREE, pair) for pair, size in _apart(into, given))
        found.apart.extend(Place(name, size, AGREE, pair) for pair, size in _apart(out, returned))
        whole = dict(given=_whole(into, given), returned=_whole(out, returned))
        owners = dict(given_by=_owners(into, given), returned_by=_owners(out, returned))
        found.calls.append(replace(calls[0], **whole, **owners))
    return found


def _resolved(layout: Layout, tensors: list[torch.Tensor], tokens: int) -> Layout:
    """The layout of these tensors; `UNKNOWN` if they cannot be joined."""
    dimensions = tensors[0].dim()
    if layout.kind == "heads" and dimensions == 2:
        layout = SAME if len(tensors[0]) == tokens else UNKNOWN
    if layout.kind in ("either", "unknown") and not any(_apart(SAME, tensors)):
        return SAME
    if layout.kind in ("same", "sum", "unknown"):
        return layout
    return Layout("split", layout.parts) if dimensions > 1 else SAME


def _whole(layout: Layout, tensors: list[torch.Tensor]) -> torch.Tensor:
    if layout.kind == "sum":
        return torch.stack(tensors).sum(0)
    if layout.kind == "same":
        return tensors[0]
    pieces = [part for parts, copies in _pieces(layout, tensors) for part in parts[::copies]]
    return torch.cat(pieces, 1)


def _owners(layout: Layout, tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The rank of each column of the whole, -1 if several have it; None if they are every rank's."""
    if layout.kind != "split":
        return None
    pieces = [
        torch.full_like(part[:1], rank if copies == 1 else -1)
        for parts, copies in _pieces(layout, tensors)
        for rank, part in list(enumerate(parts))[::copies]
    ]
    return torch.cat(pieces, 1).flatten()


def _apart(layout: Layout, tensors: list[torch.Tensor]) -> Iterator[tuple[str, float]]:
    """Ranks that should hold the same and do not, and how far they are apart."""
    if layout.kind == "sum":
        return
    same = [(tensors, len(tensors))] if layout.kind == "same" else _pieces(layout, tensors)
    for parts, copies in same:
        for rank, part in enumerate(parts):
            first = rank - rank % copies
            if rank != first and not (size := _gap(parts[first], part)) <= AGREE:
                yield f"rank {rank} against rank {first}", size


def _pieces(layout: Layout, tensors: list[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], int]]:
    """Per part of what is split, that of each rank, and how many neighbouring ranks have the same."""
    begin = 0
    for width, copies in layout.parts:
        end = begin + (width or tensors[0].shape[1])
        yield [tensor[:, begin:end] for tensor in tensors], copies
        begin = end


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else math.inf
    return ((one - other).norm() / one.norm().clamp(min=1e-30)).item()
