"""Refuse settings that need an accelerator, and set what suits a CPU, before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.patches._shared.verl_config import TARGET, Get, JobConfig, door, forbidden, overridden

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.checkpoint_engine"
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
ADAPTERS = ("lora_rank", "lora.rank", "lora_adapter_path")
"""The settings of a model that ask for LoRA adapters."""
SUMMARY = "cannot run without an accelerator:"
SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"
VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"
SEPARATE = ("separate_async", "stream_async")
"""Trainer modes whose rollouts are processes of their own."""
GLOO, GLOO_MODULE = "gloo", "flashpatch.patches.cpu.checkpoint_engine"
"""The checkpoint engine for them, and the module that registers it with verl."""
UPDATES = "fp8"
"""Name of the family that makes weight updates work; bf16 is another name of it."""
NEVER_RUN = ["async_training.use_trainer_do_validate", "async_training.use_dynamic_resource_scheduling"]
NEVER_RUN += [f"critic.model.{name}" for name in ADAPTERS]
_SLOTS = 32  # logical CPUs that verl's own actors request at least, whatever the machine has
DEFAULT = 8
"""verl's default for each of `HELPERS`, whatever the machine has."""

HELPERS = (
    "actor_rollout_ref.rollout.agent.num_workers",
    "reward.num_workers",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
)
_READ = "enable_sleep_mode free_cache_engine quantization"
DASHBOARD = "ray_kwargs.ray_init.include_dashboard"

patches = Patches("cpu", "verl>=0.9", scope="driver")


@patches.wrap(
    TARGET,
    relies_on=(
        "config.trainer.n_gpus_per_node",
        "config.actor_rollout_ref.actor.strategy",
        *(f"verl.workers.config.rollout:RolloutConfig.{name}" for name in _READ.split()),
        "verl.workers.config.rollout:CheckpointEngineConfig.custom_backend_module",
        "verl.checkpoint_engine.base:CheckpointEngineRegistry.register",
        "verl.checkpoint_engine.base:CheckpointEngine.build_topology",
    ),
    evidence="install",
    why="Some settings fail minutes later in another process, or hang: sleep mode, flash attention and one "
    "Ray GPU per rank are verl's defaults, and verl's own quantization does not run.",
    remove_when="never: it states what the family can run.",
)
def validate_config(original, config: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse by name, before anything starts, what does not run, and replace defaults that need an accelerator or many
    cores, which is logged.

    Replaced are device, sleep mode, attention, and Ray's counts of CPUs and GPUs, which are slots, not hardware.
    Separate rollouts get the checkpoint engine gloo. With few cores verl's numbers of agent-loop workers, reward
    workers and storage units are lowered from 8 to one per two cores, and Ray's dashboard is left out. Raises
    PatchError if settings need an accelerator; all are named."""
    job = JobConfig.open(config, patches.of(validate_config).id)
    refused = list(refusals(job.get))
    if not engine.enabled(UPDATES):
        refused.append("FLASHPATCH without bf16 or fp8 (engines alone cannot load weights twice on a CPU)")
    job.refuse(refused, SUMMARY, "Change these settings, or take cpu out of FLASHPATCH.")
    for changes, reason in (
        (adaptations(job.get), "this machine has no accelerator"),
        (transfer(job.get), "weights reach separate rollouts through Ray's object store"),
        (
            for_few_cores(job.get, _starts_ray(job.get)),
            f"this machine has {cores()} cores; set on the command line it stays",
        ),
    ):
        for path, value in changes:
            job.set(path, value, reason)
    return original(config, *args, **kwargs)


door(patches)


def refusals(get: Get) -> Iterator[str]:
    """Yield the settings that cannot run without an accelerator, each with the reason."""
    ranks = (get("trainer.n_gpus_per_node") or 1) * (get("trainer.nnodes") or 1)
    gathered = get(f"{ACTOR}.strategy") in (None, "fsdp") and ranks > 1
    for name in ADAPTERS:
        path = f"{MODEL}.{name}"
        if get(path) and not get(f"{MODEL}.lora.merge") and gathered:
            yield f"{path}={get(path)} with {ACTOR}.strategy=fsdp on several ranks (verl sends memory that FSDP1 has freed; use fsdp2)"
    path = f"{MODEL}.lora_adapter_path"
    if get(path) and get(f"{ROLLOUT}.name") == "sglang" and not get(f"{MODEL}.lora.merge"):
        yield f"{path}={get(path)} (never run on SGLang: add {MODEL}.lora.merge=True)"
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        strategy = get(f"{role}.strategy")
        if strategy not in (None, "fsdp", "fsdp2"):
            yield f"{role}.strategy={strategy} (use fsdp or fsdp2)"
        for part in (role, f"{role}.fsdp_config"):
            path = f"{part}.ulysses_sequence_parallel_size"
            if get(path, 1) not in (None, 1) and get(ATTENTION) not in (None, "sdpa"):
                yield f"{path}={get(path)} with {ATTENTION}={get(ATTENTION)} (Ulysses runs with sdpa here)"
    if get(f"{ROLLOUT}.name") not in (None, "vllm", "sglang"):
        yield f"{ROLLOUT}.name={get(f'{ROLLOUT}.name')} (use vllm or sglang)"
    never = dict.fromkeys(NEVER_RUN, "never run without an accelerator")
    own = "verl's kernels need an accelerator; FLASHPATCH=cpu,fp8 quantizes with the engine's own"
    yield from forbidden(get, {f"{ROLLOUT}.quantization": own, **never})
    backend, module = get(f"{ENGINE}.backend", "naive"), get(f"{ENGINE}.custom_backend_module")
    if module:
        return  # a transfer of the user's own
    if backend not in (None, "naive", GLOO):
        yield (
            f"{ENGINE}.backend={backend} (verl's engines for separate rollouts need an accelerator; {GLOO}, from "
            "FlashPatch, does not)"
        )


def separates(get: Get) -> bool:
    """Whether trainer and rollouts are processes of their own."""
    if get("rollout.nnodes") is not None:  # verl.experimental: fully_async_policy, one_step_off_policy
        return True
    return bool(get("trainer.use_v1", True)) and get("trainer.v1.trainer_mode") in SEPARATE


def transfer(get: Get) -> Iterator[tuple[str, Any]]:
    """Yield the settings that send weights to separate rollouts, if the user chose no other way."""
    chosen, module = get(f"{ENGINE}.backend", "naive"), get(f"{ENGINE}.custom_backend_module")
    if module or not (chosen == GLOO or (separates(get) and chosen in (None, "naive"))):
        return
    if chosen != GLOO:
        yield f"{ENGINE}.backend", GLOO
    yield f"{ENGINE}.custom_backend_module", GLOO_MODULE


def adaptations(get: Get) -> Iterator[tuple[str, Any]]:
    """Yield the settings whose usual value needs an accelerator, each with its value for a CPU."""
    if get("trainer.device") != "cpu":
        yield "trainer.device", "cpu"
    for name in ("free_cache_engine", "enable_sleep_mode"):
        if get(f"{ROLLOUT}.{name}", True):
            yield f"{ROLLOUT}.{name}", False
    if get(ATTENTION) is None:
        yield ATTENTION, "sdpa"
    if get(f"{ROLLOUT}.name") == "sglang":
        yield from sglang_arguments(get)
        ranks, variables = get(f"{ROLLOUT}.tensor_model_parallel_size", 1), {"SGLANG_USE_CPU_ENGINE": "1"}
        if ranks > 1:  # they share all cores with the trainer
            each = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([each] * ranks)
        for name, value in variables.items():
            if get(f"{VARIABLES}.{name}") is None:
                yield f"{VARIABLES}.{name}", value
    if _starts_ray(get):
        ranks = get("trainer.n_gpus_per_node", 1) * get("trainer.nnodes", 1)
        if separates(get):
            ranks += get(f"{ROLLOUT}.n_gpus_per_node", 0) * get(f"{ROLLOUT}.nnodes", 0)
        if get("ray_kwargs.ray_init.num_gpus") is None:
            yield "ray_kwargs.ray_init.num_gpus", ranks
        if get("ray_kwargs.ray_init.num_cpus") is None:
            yield "ray_kwargs.ray_init.num_cpus", max(os.cpu_count() or 1, _SLOTS + 4 * ranks)


def sglang_arguments(get: Get) -> Iterator[tuple[str, Any]]:
    """Yield SGLang's server arguments for a CPU, if the user chose none."""
    length = get(f"{ROLLOUT}.max_model_len") or get(f"{ROLLOUT}.prompt_length", 0) + get(
        f"{ROLLOUT}.response_length", 0
    )
    wanted = {
        "device": "cpu",
        "attention_backend": "intel_amx",
        "grammar_backend": "none",
        "lora_backend": "torch_native",  # its others are in Triton
        "enable_memory_saver": False,
        # Of the memory that was free at the start; whatever other processes took since then counts as this engine's.
        "mem_fraction_static": 0.95,
        "max_total_tokens": length * get(f"{ROLLOUT}.max_num_seqs", 1),  # more are never in use at once
    }
    for name, value in wanted.items():
        if get(f"{SGLANG}.{name}") is None:
            yield f"{SGLANG}.{name}", value


def _starts_ray(get: Get) -> bool:
    """Whether this driver starts its own Ray instead of joining a running cluster."""
    if get("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS"):
        return False
    import ray

    return not ray.is_initialized()


def for_few_cores(get: Any, starts_ray: bool) -> Iterator[tuple[str, Any]]:
    """Yield settings that the configuration does not give, with their value for this machine: one helper per two cores, no dashboard.
    Helpers of one kind share out a batch and do the same to each part, so that their number changes no result."""
    fitting = max(1, cores() // 2)
    if fitting >= DEFAULT:
        return
    given = overridden()
    for path in HELPERS if given is not None else ():
        if get(path) == DEFAULT and path not in given:
            yield path, fitting
    if starts_ray and get(DASHBOARD) is None:
        yield DASHBOARD, False


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
