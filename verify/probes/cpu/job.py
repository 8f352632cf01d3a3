"""One of the probe's two ranks: what verl does at its start, and one optimizer step under each FSDP.

Run by `flashpatch.verify.probes.cpu.probe` as a user's program would be: the variables say all.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

ROWS, WIDTH, RATE = 8, 4, 0.1


def network(seed: int) -> torch.nn.Sequential:
    """A small network; ranks give different seeds, as FSDP must level them."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))


def rows() -> torch.Tensor:
    """The whole batch, the same in every process."""
    return torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def step(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """One step of plain gradient descent on the batch's mean output, squared."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model(batch).square().mean().backward()
    optimizer.step()


def plain() -> list[float]:
    """What one process without FSDP gets from rank 0's network and the whole batch."""
    model = network(0)
    step(model, rows())
    return flat(model.state_dict().values())


def flat(tensors: Any) -> list[float]:
    return [value for tensor in tensors for value in tensor.flatten().tolist()]


def main() -> None:
    """Write ``seen-RANK.json`` in the directory given."""
    workdir, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    seen: dict[str, Any] = {}

    import verl.single_controller.ray.base  # noqa: F401
    import verl.trainer.main_ppo  # noqa: F401
    import verl.workers.rollout.vllm_rollout.vllm_async_server  # noqa: F401
    from verl.plugin.platform import get_platform
    from verl.third_party.vllm import vllm_version
    from verl.utils import distributed
    from verl.utils.device import get_device_id
    from verl.workers.engine import EngineRegistry

    seen["platform"], seen["vllm"] = get_platform().device_name, vllm_version
    seen["engine"] = EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__
    if rank == 0:
        seen["refused"] = refused()

    distributed.initialize_global_process_group_ray(timeout_second=120)
    half = rows().chunk(2)[rank]
    seen["fsdp"] = sharded_once(network(rank), half, get_device_id())
    seen["fsdp2"] = sharded_twice(network(0), half)
    (workdir / f"seen-{rank}.json").write_text(json.dumps(seen))
    distributed.destroy_global_process_group()


def refused() -> str:
    """What the driver's first check says to a recipe with LoRA."""
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    from flashpatch.errors import PatchError

    try:
        validate_config(OmegaConf.create({"actor_rollout_ref": {"model": {"lora_rank": 8}}}), False, False)
    except PatchError as error:
        return str(error)
    return ""


def sharded_once(model: torch.nn.Module, batch: torch.Tensor, device: Any) -> list[float]:
    """FSDP1 as verl builds it: every rank takes rank 0's weights."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    whole = FullyShardedDataParallel(model, device_id=device, sync_module_states=True, use_orig_params=True)
    step(whole, batch)
    with FullyShardedDataParallel.summon_full_params(whole):
        return flat(whole.parameters())


def sharded_twice(model: torch.nn.Module, batch: torch.Tensor) -> list[float]:
    """FSDP2 with the offload policy that verl gives a reference policy."""
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), offload_policy=CPUOffloadPolicy())
    step(model, batch)
    return flat(parameter.full_tensor() for parameter in model.parameters())
