"""Run quantized rollouts on stock engines, and update their weights in place, exactly (FlashRL)."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches._shared import instances
from flashpatch.patches.fp8 import prime_rl, senders, trl, vllm_0_24
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.sglang import PATCHES as SGLANG
from flashpatch.patches.fp8.sglang.engine_args import QUANTIZATIONS
from flashpatch.patches.fp8.sglang_0_5_12 import PATCHES as SGLANG_0_5_12
from flashpatch.patches.fp8.sglang_lora import PATCHES as SGLANG_LORA
from flashpatch.patches.fp8.verl import PATCHES as VERL
from flashpatch.patches.fp8.verl_sglang import PATCHES as VERL_SGLANG
from flashpatch.patches.fp8.verl_sglang_0_5_12 import PATCHES as VERL_SGLANG_0_5_12
from flashpatch.patches.fp8.verl_vllm import PATCHES as VERL_VLLM
from flashpatch.patches.fp8.vllm import (
    caches,
    client,
    cpu_kernels,
    engine_args,
    engine_core,
    expected_processes,
    model_loader,
    reload,
    worker,
)
from flashpatch.patches.fp8.vllm_lora import PATCHES as VLLM_LORA
from flashpatch.record import Family, Option


def _too_late() -> str | None:
    """Return a sentence when an engine was built before the family was enabled, else None."""
    if late := len(instances.of_modules(instances.SGLANG)):
        return f"{late} SGLang engine(s) exist already and stay as they are; build them after enabling."
    return client.find_late()


FAMILY = Family(
    name="fp8",
    summary="quantized (fp8, int8) or bf16 rollouts with exact in-place weight updates",
    patches=(
        *collected(engine_args, model_loader, cpu_kernels, reload, worker, engine_core, caches, client),
        *collected(expected_processes, vllm_0_24),
        *VLLM_LORA,
        *VERL,
        *VERL_VLLM,
        *SGLANG,
        *VERL_SGLANG,
        *SGLANG_0_5_12,
        *SGLANG_LORA,
        *VERL_SGLANG_0_5_12,
        *collected(trl, senders, prime_rl),
    ),
    names={precision: {"precision": precision} for precision in fleet.SCHEMES},
    about={
        "fp8": "fp8 rollouts whose weights each update replaces exactly, in place",
        "bf16": "rollouts without quantization, with the same exact updates",
        "fp8_channel": "as fp8, with a scale per output channel on every platform",
        "fp8_tensor": "as fp8, with a scale per tensor on every platform",
        "int8": "int8 rollouts, weights and activations, with exact updates",
        "int8_weight_only": "int8 weights alone, activations stay as they are; exact updates",
    },
    options={
        "precision": Option(
            "fp8", "set by the name, for engines opened without a quantization", tuple(fleet.SCHEMES)
        ),
        "fleet": Option(
            [], "tables with a precision each, assigned to replicas in turn", kind=list, items=dict
        ),
        "scheme": Option("", "vLLM's name of the quantization; empty: chosen for the platform", fleet.ONLINE),
        "profile": Option("", "absolute path of a smoothing profile for int8"),
        "lm_head": Option(
            "",
            "float32: compute the lm_head in float32, under verl in the trainer too; empty: in the model's dtype",
            ("", "float32"),
        ),
        "logprobs": Option(
            "processed",
            "processed: logprobs after temperature, top-k and top-p; asked: as the engine is configured",
            ("processed", "asked"),
        ),
        "exclude_models": Option(
            [], "patterns of models' paths, not of layers; those models keep their own precision", kind=list
        ),
        "atomic": Option(
            "layer",
            "layer: update layer by layer, a failure stops generation; model: stage all weights until commit",
            ("layer", "model"),
        ),
        "partial": Option(False, "accept updates without some of the layers", kind=bool),
        "verify_commit": Option(
            False,
            "after each update, compute checksums of the weights and compare them over replicas",
            kind=bool,
        ),
        "in_flight": Option(
            "refuse",
            "when an update meets running requests: refuse it, or abort, recompute or keep the requests",
            ("refuse", "abort", "recompute", "keep"),
        ),
        "delta_sync": Option(
            False,
            "under verl, with rollouts in processes of their own: send only the values that changed since the last sync",
            kind=bool,
        ),
        "tis": Option(
            "auto",
            "auto: truncated importance sampling for quantized rollouts unless a correction is set; off: never",
            ("auto", "off"),
        ),
        "certificate": Option(
            "off",
            "under verl, before the job starts: compare the rollout's engine with the trainer's model; warn or stop if they differ",
            ("off", "warn", "stop"),
        ),
        "certificate_seconds": Option(
            300.0, "seconds after which the comparison is given up; 0: never", kind=float, least=0
        ),
        "transfer_timeout": Option(
            600.0,
            "seconds without progress after which a weight transfer under verl fails; 0: never",
            kind=float,
            least=0,
        ),
    },
    too_late=_too_late,
    not_on={"sglang": tuple(name for name in fleet.SCHEMES if name not in QUANTIZATIONS)},
    commands={"profile": "flashpatch.patches.fp8.calibration.command"},
    refuses=(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "vllm.v1.engine.core:EngineCore.__init__",
        "sglang.srt.arg_groups.pipeline:run_resolution_pipeline",
        "sglang.srt.server_args:ServerArgs.__post_init__",
        "sglang.srt.managers.scheduler:Scheduler.__init__",
    ),
)
