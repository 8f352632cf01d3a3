"""Find what one rank of an FSDP model holds: for each entry of the state dict, runs of consecutive elements, and the
names under which verl exports them: it renames entries, sends adapters without their base, and splits packed experts.

Shards are read without a gather: FSDP2's DTensors and FSDP1's flat parameters. Sources:
``torch/distributed/fsdp/_flat_param.py`` (``_ShardParamInfo``: where a parameter lies in the local shard) and
``torch/distributed/tensor/_utils.py`` (``compute_local_shape_and_global_offset``). Names: ``verl/utils/model.py: convert_weight_keys``,
``verl/workers/engine/fsdp/utils.py: unfuse_moe_params``, and for adapters ``verl/utils/fsdp_utils.py:
collect_lora_params``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from flashpatch.errors import PatchError
from flashpatch.patches._shared import fingerprint, streams

_CHUNK = 1 << 20  # elements of a block that is not consecutive, laid out at once
GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"
_ADAPTER = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")
"""A part of an adapter; verl's has the name that PEFT gives the first one, and is exported without it."""


@dataclass(frozen=True)
class Place:
    """Where this rank stands in the device mesh: ``replica`` of ``replicas`` whole copies of the model, and
    ``rank`` among those that share that copy."""

    replicas: int = 1
    replica: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Own:
    """Hold this rank's part of one entry.

    Attributes:
        shape: of the whole entry.
        runs: ``(start, values)``: consecutive elements of the flattened entry from ``start``.
        block: a part that is no run: ``(offset in each dimension, values)``."""

    shape: tuple[int, ...]
    runs: tuple[tuple[int, torch.Tensor], ...] = ()
    block: tuple[tuple[int, ...], torch.Tensor] | None = None

    def sums(
        self, begin: int, end: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> fingerprint.Sums:
        """Return this rank's part of the fingerprint of the elements ``[begin, end)``, cast to ``dtype``.

        What is offloaded to the host is read on ``device``, if one is given: a host's thread reads 3 GB/s."""

        def part(start: int, values: torch.Tensor) -> fingerprint.Sums:
            values = values[max(begin - start, 0) : end - start]
            return fingerprint.of(
                values.to(device) if device and values.is_cpu else values, max(start - begin, 0), dtype
            )

        return fingerprint.total(
            part(start, values)
            for start, values in self._all_runs()
            if start < end and start + values.numel() > begin
        )

    def _all_runs(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from self.runs
        if self.block is None:
            return
        offset, values = self.block
        inner = prod(self.shape[1:])
        rows = max(1, _CHUNK // max(inner, 1))
        where = tuple(slice(o, o + n) for o, n in zip(offset[1:], values.shape[1:], strict=True))
        for at in range(0, values.shape[0], rows):
            part = values[at : at + rows]
            whole = part.new_zeros((part.shape[0], *self.shape[1:]))
            whole[(slice(None), *where)] = part
            yield (offset[0] + at) * inner, whole.view(-1)


def place(mesh: Any) -> Place:
    """Return this rank's position in verl's mesh: one dimension shards, of two the first replicates."""
    if mesh.ndim == 1:
        return Place(rank=mesh.get_local_rank())
    return Place(mesh.size(0), mesh.get_local_rank(0), mesh.get_local_rank(1))


def own(module: torch.nn.Module, at: Place) -> dict[str, Own]:
    """Return the entries of the state dict by name, with this rank's part of its replica. Raises PatchError if an entry
    is distributed in a way that this audit does not know."""
    streams.settle()
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        return _flat(module, at)
    return {name: _entry(name, value, at) for name, value in module.state_dict().items()}


def _entry(name: str, value: torch.Tensor, at: Place) -> Own:
    if not isinstance(value, DTensor):
        return _whole(value, at)
    placements = tuple(value.placements)
    sharded, replicated = placements[-1], placements[:-1]
    known = type(sharded) is Shard and len(placements) == value.device_mesh.ndim
    if not known or not all(isinstance(one, Replicate) for one in replicated) or len(replicated) > 1:
        raise PatchError(
            f"{name} is distributed as {placements}.",
            patch="fsdp.verl.get_per_tensor_param",
            advice="The audit supports shards and replicas of shards; set the option audit to off.",
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(value.shape)
    local = value.to_local().detach()
    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, placements)
    if local.numel() == 0:
        return Own(shape)
    if sharded.dim == 0:
        return Own(shape, ((offset[0] * prod(shape[1:]), local.reshape(-1)),))
    return Own(shape, block=(tuple(offset), local))


def _whole(value: torch.Tensor, at: Place) -> Own:
    """Return an entry that every rank has whole; only the first rank of a replica contributes it."""
    runs = ((0, value.detach().reshape(-1)),) if at.rank == 0 else ()
    return Own(tuple(value.shape), runs)


def _flat(root: torch.nn.Module, at: Place) -> dict[str, Own]:
    """FSDP1: parameters from the local shards of the flat parameters, and what is not flattened."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    entries: dict[str, Own] = {}
    for path, unit in root.named_modules(remove_duplicate=False):
        handle = unit._handle if isinstance(unit, FullyShardedDataParallel) else None
        if handle is None:
            continue
        flat = handle.flat_param
        prefix = clean_tensor_name(f"{path}." if path else "")
        local = getattr(flat, "_local_shard", flat).detach().reshape(-1)
        alone = not handle.uses_sharded_strategy
        for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
            runs: tuple[tuple[int, torch.Tensor], ...] = ()
            if info.in_shard and not (alone and at.rank):
                values = local[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                runs = ((info.intra_param_start_idx, values),)
            entries[clean_tensor_name(prefix + name)] = Own(tuple(shape), runs)
        for info in flat._shared_param_infos:
            twin = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
            first = f"{info.prim_module_name}." if info.prim_module_name else ""
            entries[clean_tensor_name(prefix + twin)] = entries[
                clean_tensor_name(prefix + first + info.prim_param_name)
            ]
    for name, value in _unflattened(root):
        entries.setdefault(clean_tensor_name(name), _whole(value, at))
    return entries


def _unflattened(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield persistent buffers, and parameters that FSDP1 ignores."""
    from torch.distributed.fsdp import FlatParameter

    flattened: set[int] = set()
    for module in root.modules():
        handle = getattr(module, "_handle", None)
        if handle is not None:
            for kept in ("_params", "_shared_params"):  # the original ones, if they are kept
                flattened.update(map(id, getattr(handle.flat_param, kept, None) or ()))
    for path, module in root.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, value
        for name, value in module._parameters.items():
            if value is None or isinstance(value, FlatParameter) or id(value) in flattened:
                continue
            yield prefix + name, value


@dataclass(frozen=True)
class Part:
    """Name the elements ``[begin, end)`` of the flattened entry ``of``, exported with ``shape``."""

    of: str
    begin: int
    end: int
    shape: tuple[int, ...]


def exported(entries: dict[str, Own], module: Any, adapter: bool, base_sync_done: bool) -> dict[str, Own]:
    """Return the entries that verl exports, under the names that it gives them.

    Args:
        entries: of the state dict, by name.
        module: the trainer's model.
        adapter: whether it has a LoRA adapter that is not merged.
        base_sync_done: whether of such a model the adapter is exported, not the base."""
    from verl.utils.model import convert_weight_keys

    whole = getattr(module, "_fsdp_wrapped_module", module)
    if adapter:
        own = {_ADAPTER.sub(r"\1", name): one for name, one in entries.items() if "lora_" in name}
        entries = own if base_sync_done else _of_base(entries, whole.peft_config["default"])
    return convert_weight_keys(entries, whole)


def _of_base(entries: Mapping[str, Own], adapter: Any) -> dict[str, Own]:
    from verl.utils.fsdp_utils import replace_lora_wrapper

    names = {name: name.removeprefix("base_model.model.").replace(".base_layer", "") for name in entries}
    return {
        replace_lora_wrapper(names[name], adapter): own
        for name, own in entries.items()
        if "lora_" not in name
    }


def parts(entries: Mapping[str, Own]) -> dict[str, Part]:
    """Every name that the entries may be exported under: their own, and those of the experts in a packed one."""
    found = {name: Part(name, 0, prod(own.shape), own.shape) for name, own in entries.items()}
    for name, own in entries.items():
        for expert in _experts(name, own.shape):
            found.setdefault(*expert)
    return found


def _experts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Part]]:
    """Packed ``[experts, 2 x inner, hidden]`` holds each expert's gate, then its up projection."""
    if len(shape) != 3 or not name.endswith((GATE_UP, DOWN)):
        return
    number, rows, width = shape
    fused = name.endswith(GATE_UP)
    base = name.removesuffix(".gate_up_proj").removesuffix(".down_proj")
    half = -(-rows // 2)  # as torch.chunk cuts
    pieces = (("gate_proj", 0, half), ("up_proj", half, rows)) if fused else (("down_proj", 0, rows),)
    for expert in range(number):
        for projection, first, last in pieces:
            begin, end = (expert * rows + first) * width, (expert * rows + last) * width
            part = Part(name, begin, end, (last - first, width))
            yield f"{base}.{expert}.{projection}.weight", part
