"""Functions of frameworks that more than one patch wraps: each is listed with the order of its wrappers and why that is right.

Families are armed in one order (`flashpatch.patches.ORDER`), however they were typed, and the patches of a family in the order
that it lists them: the last is outermost, and runs first. A second wrapper of a function that is not listed fails here: use a door
of `patches/_shared`, or list it with a reason."""

import pkgutil
import re
from collections.abc import Mapping
from typing import NamedTuple

from flashpatch import index, patches, registry
from flashpatch.record import Patch

_SGLANG = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_VERL_VLLM = "verl.workers.rollout.vllm_rollout"
_SERVERS = "verl.workers.rollout.llm_server"


class Listed(NamedTuple):
    """The patches that wrap a function, innermost first, and why no other order is needed.

    ``older`` are those for an older generation of the framework, which are never on beside the others."""

    wrappers: tuple[str, ...]
    why: str
    older: tuple[str, ...] = ()


AUDIT = "the audit sees what the sender sent, before fp8 stages it; what it refuses is not committed"
_OLD = "fp8.sglang_0_5_12.runner_update_weights_from_tensor fsdp.sglang_0_5_12.update_weights_from_tensor"
AUDITED_OLD = tuple(_OLD.split())
COUNTS = "each adds names of its own to what the call carries"
STEP = "fp8 refuses the step just before it runs; eagle only ends records before"

SHARED: Mapping[str, Listed] = {
    "verl.utils.config:validate_config": Listed(
        (
            *"cpu.verl.validate_config fp8.verl.validate_config_rollout fp8.verl.validate_config_certificate".split(),
            *"fp8.verl.validate_config_correction fp8.verl.validate_config_logprobs grpo.verl.validate_config".split(),
            *"fsdp.verl.validate_config eagle.verl.validate_config flowrl.verl.validate_config".split(),
        ),
        "through `_shared.verl_config`: each sets what the user did not choose and refuses by name",
    ),
    "verl.trainer.main_ppo:run_ppo": Listed(
        tuple(f"{family}.verl.run_ppo" for family in "cpu fp8 grpo fsdp eagle flowrl".split()), "the same"
    ),
    "verl.utils.tracking:Tracking.log": Listed(("fp8.verl.tracking_log", "eagle.verl.tracking_log"), COUNTS),
    "verl.trainer.ppo.core_algos:register_policy_loss": Listed(
        ("grpo.verl.register_policy_loss", "flowrl.verl.register_policy_loss"), "registrations, two names"
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module": Listed(
        ("cpu.verl.build_module", "fp8.verl.build_module", "flowrl.verl.build_module"),
        "cpu hooks layers; fp8 changes the head's forward; flowrl hangs a module of its own beside it",
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_per_tensor_param": Listed(
        ("fp8.verl.get_per_tensor_param", "fsdp.verl.get_per_tensor_param"),
        "fp8 times the gather alone; fsdp adds fingerprints behind what it returns",
    ),
    "verl.workers.engine_workers:ActorRolloutRefWorker.update_weights": Listed(
        ("fp8.verl.actor_update_weights_delta", "fp8.verl.actor_update_weights"), "one family: its own order"
    ),
    "verl.checkpoint_engine.base:CheckpointEngineManager.update_weights": Listed(
        (
            "fp8.verl.checkpoint_manager_update_weights_delta",
            "fp8.verl.checkpoint_manager_update_weights",
            "eagle.verl.update_weights",
        ),
        "a drafter is sent after the policy's sync has been checked",
    ),
    f"{_SERVERS}:LLMServerClient.generate": Listed(
        ("grpo.verl.generate", "grpo.verl.generate_part"), "one family: its own order"
    ),
    f"{_VERL_VLLM}.bucketed_weight_transfer:BucketedWeightReceiver.receive_weights": Listed(
        ("fp8.verl_vllm.receive_weights", "fsdp.verl_vllm.receive_weights"), AUDIT
    ),
    f"{_VERL_VLLM}.vllm_async_server:vLLMHttpServer.collective_rpc": Listed(
        ("fp8.verl_vllm.collective_rpc", "eagle.verl_vllm.collective_rpc"),
        "each answers methods of its own name",
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_outputs": Listed(
        ("fp8.verl.prepare_model_outputs", "flowrl.verl.prepare_model_outputs"),
        "flowrl adds log Z to what the forward returns, whatever its log-probabilities are over",
    ),
    "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer.generate": Listed(
        ("fp8.verl_sglang.generate", "eagle.verl_sglang.generate"), COUNTS
    ),
    "vllm.v1.engine.core:EngineCore.collective_rpc": Listed(
        ("fp8.vllm.collective_rpc", "eagle.vllm.collective_rpc"),
        "acceptance is judged anew after the policy's version is known",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": Listed(
        ("fp8.vllm.model_runner_execute_model", "eagle.vllm.execute_model"), STEP
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model": Listed(
        ("fp8.vllm.model_runner_v2_execute_model", "eagle.vllm.execute_model_v2"), STEP
    ),
    "sglang.srt.arg_groups.pipeline:run_resolution_pipeline": Listed(
        ("fp8.sglang.run_resolution_pipeline", "eagle.sglang.run_resolution_pipeline"),
        "they set different arguments: quantization, speculation",
    ),
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request": Listed(
        ("fp8.sglang.generate_request", "grpo.sglang.generate_request"),
        "each reads a part of its own of what SGLang returns",
    ),
    f"{_SGLANG}.begin_weight_update": Listed(
        (
            "fp8.sglang.begin_weight_update",
            "fsdp.sglang.begin_weight_update",
            "eagle.sglang.begin_weight_update",
        ),
        "an audit opens only for a session that fp8 has opened",
    ),
    f"{_SGLANG}.end_weight_update": Listed(
        ("fp8.sglang.end_weight_update", "fsdp.sglang.end_weight_update", "eagle.sglang.end_weight_update"),
        "the audit ends before fp8 commits; eagle counts what was committed",
    ),
    f"{_SGLANG}.update_weights_from_disk": Listed(
        ("fp8.sglang.scheduler_update_weights_from_disk", "eagle.sglang.update_weights_from_disk"),
        "eagle counts what was committed",
    ),
    "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater.update_weights_from_tensor": Listed(
        ("fp8.sglang.update_weights_from_tensor", "fsdp.sglang.update_weights_from_tensor"),
        AUDIT,
        AUDITED_OLD,
    ),
    "sglang.srt.model_executor.model_runner:ModelRunner.update_weights_from_tensor": Listed(
        AUDITED_OLD, AUDIT
    ),
    "sglang.srt.managers.scheduler:Scheduler.__init__": Listed(
        ("fp8.sglang_0_5_12.scheduler_init", "fsdp.sglang_0_5_12.scheduler_init"),
        "the audit joins sessions by the door `_shared.sglang_sessions`",
    ),
}


def _generation(patch: Patch) -> str:
    """Return the SGLang that a patch is for: those of older ones are never on beside newer ones."""
    found = re.search(r"_\d+_\d+(_\d+)?$", patch.id.split(".")[1])
    return found[0] if found else ""


def wrapped() -> dict[str, set[tuple[str, ...]]]:
    """Return the functions that several patches wrap in one process, with these patches, innermost first."""
    found: dict[str, dict[str, list[str]]] = {}
    for family in patches.ORDER:
        for patch in registry.family(family).patches:
            for target in patch.targets:
                for one in [_generation(patch)] if patch.framework != "verl" else [""]:
                    found.setdefault(target, {}).setdefault(one, []).append(patch.id)
    return {
        target: several
        for target, ways in found.items()
        if (several := {tuple(ids) for ids in ways.values() if len(ids) > 1})
    }


def test_each_function_with_several_wrappers_is_listed_in_the_order_of_arming() -> None:
    assert wrapped() == {t: {listed.wrappers, listed.older} - {()} for t, listed in SHARED.items()}
    assert all(listed.why for listed in SHARED.values())


def test_each_family_has_its_place() -> None:
    folders = {module.name for module in pkgutil.iter_modules(patches.__path__) if module.name[0] != "_"}
    assert set(patches.ORDER) == folders and len(patches.ORDER) == len(folders)
    assert index.families() == patches.ORDER
