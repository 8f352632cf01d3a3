"""Run quantized rollouts on stock engines, and update their weights in place, exactly (FlashRL)."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.sglang import PATCHES as SGLANG
from flashpatch.patches.fp8.verl import PATCHES as VERL
from flashpatch.patches.fp8.vllm import (
    client_errors,
    engine_args,
    expected_processes,
    initialize_model,
    reload,
    scheduler_gate,
    worker,
)
from flashpatch.proof import Proof
from flashpatch.record import Family, Option


def _too_late() -> str | None:
    """Return a sentence when an engine was built before the family was enabled, else None."""
    return _too_late_sglang() or _too_late_vllm()


def _too_late_sglang() -> str | None:
    module = sys.modules.get("sglang.srt.managers.scheduler")
    if module is None:
        return None
    import gc

    from flashpatch.patches.fp8.sglang import schedulers

    unknown = [o for o in gc.get_objects() if isinstance(o, module.Scheduler) and o not in schedulers.known()]
    if not unknown:
        return None
    return f"{len(unknown)} SGLang scheduler(s) exist already and stay as they are; build engines after enabling."


def _too_late_vllm() -> str | None:
    module = sys.modules.get("vllm.v1.engine.core")
    if module is None:
        return None
    import gc

    engines = [o for o in gc.get_objects() if isinstance(o, module.EngineCore)]
    unknown = [e for e in engines if e not in scheduler_gate.gates]
    if not unknown:
        return None
    return f"{len(unknown)} vLLM engine(s) exist already and stay as they are; build them after enabling."


def _probe(nonce: str, workdir: Path) -> list[Proof]:
    if find_spec("vllm") is None and find_spec("sglang") is not None:
        from flashpatch.verify.probes.fp8.sglang_probe import probe
    else:
        from flashpatch.verify.probes.fp8.vllm_probe import probe

    return probe(nonce, workdir)


FAMILY = Family(
    name="fp8",
    summary="quantized (fp8, int8) or bf16 rollouts with exact in-place weight updates",
    patches=(
        engine_args.PATCH,
        initialize_model.PATCH,
        reload.BEGIN,
        reload.END,
        reload.FINISH,
        worker.LOAD,
        worker.STEP,
        worker.SLEEP,
        scheduler_gate.INIT,
        scheduler_gate.STEP,
        scheduler_gate.QUEUE,
        scheduler_gate.RPC,
        client_errors.PATCH,
        client_errors.STEP,
        expected_processes.CORES,
        expected_processes.WORKERS,
        *VERL,
        *SGLANG,
    ),
    names={precision: {"precision": precision} for precision in fleet.SCHEMES},
    options={
        "precision": Option(
            "fp8", "precision of engines opened without an explicit quantization", tuple(fleet.SCHEMES)
        ),
        "fleet": Option(
            [], "a precision per replica, in turn: tables with precision and scheme", kind=list, items=dict
        ),
        "scheme": Option("", "vLLM's name of the fp8 scheme; empty: the platform's default"),
        "profile": Option("", "for int8: absolute path of a profile that smooths the trainer's weights"),
        "lm_head": Option(
            "", "float32: compute the lm_head in float32; empty: in the model's dtype", ("", "float32")
        ),
        "logprobs": Option(
            "processed",
            "processed: logprobs after temperature, top-k and top-p; asked: as the engine's caller set them",
            ("processed", "asked"),
        ),
        "exclude": Option([], "path patterns of models that keep their own precision", kind=list),
        "atomic": Option(
            "layer",
            "layer: least memory, a failed update stops generation; model: twice the weights, it does not",
            ("layer", "model"),
        ),
        "partial": Option(False, "accept updates that leave out whole layers", kind=bool),
        "in_flight": Option(
            "refuse",
            "with requests running at an update: refuse the update, abort, recompute or keep the requests",
            ("refuse", "abort", "recompute", "keep"),
        ),
        "tis": Option(
            "auto",
            "auto: truncated importance sampling for verl's quantized rollouts by default; off: never",
            ("auto", "off"),
        ),
        "mismatch_jump": Option(
            4.0,
            "report an update of verl when its mismatch exceeds this many times the usual; 0: never",
            kind=float,
        ),
        "transfer_timeout": Option(
            600.0,
            "seconds to wait for the peer in verl's weight transfer; 0: for ever",
            kind=float,
        ),
    },
    too_late=_too_late,
    probe=_probe,
    commands={
        "profile": "flashpatch.patches.fp8.calibration.command",
        "advise": "flashpatch.patches.fp8.advise.command",
    },
    refuses=(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "vllm.v1.engine.core:EngineCore.__init__",
        "sglang.srt.arg_groups.pipeline:run_resolution_pipeline",
        "sglang.srt.managers.scheduler:Scheduler.__init__",
    ),
)
