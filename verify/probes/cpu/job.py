"""Run one of the probe's two ranks as a user's program: start as verl does, and take one optimizer step under each FSDP."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from flashpatch.verify.probes import jobs, verl_actor

ROWS, WIDTH, RATE = 8, 4, 0.1


def network(seed: int) -> torch.nn.Sequential:
    """Return a small network; ranks give different seeds, for FSDP to broadcast rank 0's weights."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))


def rows() -> torch.Tensor:
    """Return the whole batch [ROWS, WIDTH], the same in every process."""
    return torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def step(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Take one step of plain gradient descent on the mean squared output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model(batch).square().mean().backward()
    optimizer.step()


def plain() -> list[float]:
    """Return the weights after one process's step with rank 0's network on the whole batch, without FSDP."""
    model = network(0)
    step(model, rows())
    return flat(model.parameters())


def flat(tensors: Iterable[torch.Tensor]) -> list[float]:
    return [value for tensor in tensors for value in tensor.flatten().tolist()]


def rank(workdir: Path, seen: dict[str, Any]) -> None:
    number = int(os.environ["RANK"])

    import verl.single_controller.ray.base  # noqa: F401
    import verl.trainer.main_ppo  # noqa: F401
    from verl.plugin.platform import get_platform
    from verl.utils import distributed
    from verl.utils.device import get_device_id
    from verl.workers.engine import EngineRegistry

    seen["platform"], seen["rollout"] = get_platform().device_name, rollout_engine()
    seen["engine"] = EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__
    if number == 0:
        seen["refused"] = [verl_actor.refusal({"critic": {"model": {"lora_rank": 8}}})[1] for _ in range(2)]

    distributed.initialize_global_process_group_ray(timeout_second=120)
    if number == 0:
        jobs.tell(workdir, "two ranks have started as verl's trainers do")
    half = rows().chunk(2)[number]
    seen["fsdp"] = sharded_once(network(number), half, get_device_id())
    seen["fsdp2"] = sharded_twice(network(0), half)
    distributed.destroy_global_process_group()


def rollout_engine() -> str:
    """Import verl's rollout server of the installed engine; return the engine's name and version, empty if not for a CPU."""
    if jobs.engine_here() == "vllm":
        import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
        from verl.third_party.vllm import vllm_version

        return f"vllm {vllm_version}" if vllm_version else ""
    from verl.workers.rollout.replica import get_rollout_replica_class

    get_rollout_replica_class("sglang")
    import_module("verl.workers.rollout.sglang_rollout.async_sglang_server")
    from sglang import __version__
    from sglang.srt.utils import is_cpu

    return f"sglang {__version__}" if is_cpu() else ""


def sharded_once(model: torch.nn.Module, batch: torch.Tensor, device: Any) -> list[float]:
    """Step under FSDP1 as verl builds it, with its reference policy's offload: every rank takes rank 0's weights."""
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

    offload = CPUOffload(offload_params=True)
    whole = FullyShardedDataParallel(
        model, device_id=device, sync_module_states=True, use_orig_params=True, cpu_offload=offload
    )
    step(whole, batch)
    with FullyShardedDataParallel.summon_full_params(whole):
        return flat(whole.parameters())


def sharded_twice(model: torch.nn.Module, batch: torch.Tensor) -> list[float]:
    """Step under FSDP2 with the offload policy that verl gives a reference policy, from weights that were changed and
    restored from shards that verl had saved, as it does between two updates."""
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from verl.utils.fsdp_utils import fsdp2_sharded_load_from_cpu, fsdp2_sharded_save_to_cpu

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), offload_policy=CPUOffloadPolicy())
    saved, spec = fsdp2_sharded_save_to_cpu(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    fsdp2_sharded_load_from_cpu(model, saved, spec)
    step(model, batch)
    return flat(parameter.full_tensor() for parameter in model.parameters())
