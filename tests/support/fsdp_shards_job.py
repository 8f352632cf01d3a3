"""One of two ranks: shards of a small network under every layout, against the whole tensors."""

import json
import os
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard

from flashpatch.patches._shared import fingerprint
from flashpatch.patches.fsdp import shards


class Block(nn.Module):
    """A few parameters whose sizes do not divide by two, one of a single element, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)


class Network(nn.Module):
    """Two blocks and a pair of tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 7, bias=True)
        self.head.weight = self.embed.weight


def layouts() -> dict[str, Any]:
    """Name to ``(module, mesh)``."""
    one, two, three = (
        init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("ddp", "fsdp")),
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("ddp", "fsdp")),
    )
    made: dict[str, Any] = {"none": (Network(), one)}
    for name, mesh in (("1d", one), ("2x1", two), ("1x2", three)):
        module = Network()
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        made[f"fsdp2-{name}"] = fully_shard(module, mesh=mesh), mesh
    module = Network()
    made["fsdp2-columns"] = (
        fully_shard(module, mesh=one, shard_placement_fn=lambda p: Shard(1) if p.shape[-1] == 4 else None),
        one,
    )
    strategies = {"1d": (one, "FULL_SHARD"), "1x2": (three, "HYBRID_SHARD"), "2x1": (two, "NO_SHARD")}
    for name, (mesh, strategy) in strategies.items():
        for original in (False, True):
            wrapped = FullyShardedDataParallel(
                Network(),
                device_mesh=mesh,
                device_id=torch.device("cpu"),
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=original,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
            )
            made[f"fsdp1-{name}-{'original' if original else 'flat'}"] = wrapped, mesh
    return made


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    wanted = {
        name: {str(dtype): fingerprint.of(value, dtype=dtype) for dtype in (value.dtype, torch.bfloat16)}
        for name, value in Network().state_dict().items()
    }
    seen: dict[str, Any] = {}
    for layout, (module, mesh) in layouts().items():
        at = shards.place(mesh)
        mine = shards.own(module, at)
        rows = {
            name: {
                dtype: own.sums(0, prod(own.shape), getattr(torch, dtype.removeprefix("torch.")))
                for dtype in wanted.get(name, {})
            }
            for name, own in mine.items()
        }
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, (at.replica, rows))
        replicas: dict[int, Any] = {}
        for replica, parts in gathered:
            for name, sums in parts.items():
                for dtype, value in sums.items():
                    old = replicas.setdefault(replica, {}).setdefault(name, {}).get(dtype, (0, 0))
                    replicas[replica][name][dtype] = fingerprint.total([old, value])
        held = sum(values.numel() for own in mine.values() for _, values in own.runs)
        seen[layout] = {
            "right": sorted(replicas) if all(r == wanted for r in replicas.values()) else str(replicas)[:500],
            "names": sorted(mine) == sorted(wanted),
            "held": held,
        }
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))
    dist.barrier()  # gloo aborts a rank whose peers are gone


main()
os._exit(0)  # at a normal exit gloo's threads now and then abort the process
