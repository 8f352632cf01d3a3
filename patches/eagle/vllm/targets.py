"""Targets of the records for vLLM, and the fields that the records share."""

from __future__ import annotations

from functools import partial

from flashpatch.record import Patch

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
CORE = "vllm.v1.engine.core:EngineCore"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

_VllmPatch = partial(
    Patch,
    requires="vllm>=0.24",
    remove_when="vLLM hands out hidden states, chooses its number of speculative tokens by what they bring, and "
    "updates its drafter.",
)
EnginePatch = partial(_VllmPatch, scope=frozenset({"engine-core"}))
WorkerPatch = partial(_VllmPatch, scope=frozenset({"worker"}))
