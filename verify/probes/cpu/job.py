"""Run one of the probe's two ranks as a user's program: start as verl does, and take one optimizer step under each FSDP of verl's."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flashpatch.verify.probes import jobs, verl_actor
from flashpatch.verify.probes.fsdp import job


def rank(workdir: Path, seen: dict[str, Any]) -> None:
    number = int(os.environ["RANK"])

    import verl.single_controller.ray.base  # noqa: F401
    import verl.trainer.main_ppo  # noqa: F401
    from verl.plugin.platform import get_platform
    from verl.utils import distributed
    from verl.workers.engine import EngineRegistry

    seen["platform"], seen["rollout"] = get_platform().device_name, rollout_engine()
    seen["engine"] = EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__
    if number == 0:
        seen["refused"] = [verl_actor.refusal({"critic": {"model": {"lora_rank": 8}}}) for _ in range(2)]

    distributed.initialize_global_process_group_ray(timeout_second=120)
    if number == 0:
        jobs.tell(workdir, "two ranks have started as verl's trainers do")
    wanted = job.plain_step(workdir / "model", clip=float("inf")).state_dict()
    for strategy in ("fsdp", "fsdp2"):
        found = stepped(strategy, workdir / "model", number)
        seen[strategy] = max(float((found[name] - value).abs().max()) for name, value in wanted.items())
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


def stepped(strategy: str, model: Path, number: int) -> dict[str, torch.Tensor]:
    """Return the weights after a step of plain gradient descent of a reference policy of verl's, which has rank 0's weights and
    offloads them. Those of FSDP2 were changed before, and restored from shards that verl had saved, as it does between two updates."""
    from verl.experimental.separation.engine_workers import DetachActorWorker

    config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
    worker = SimpleNamespace(config=config, _strategy_handlers=None)
    engine = verl_actor.engine(strategy, model, job.RATE, forward_only=True, model_dtype="fp32")
    if strategy == "fsdp2":
        save, restore = DetachActorWorker._get_strategy_handlers(worker)
        saved = save(engine.module)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.add_(1.0)
        restore(engine.module, *saved)
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=job.RATE)
    job.loss(engine.module, job.batch().chunk(2)[number]).backward()
    optimizer.step()
    return dict(engine.get_per_tensor_param()[0])
