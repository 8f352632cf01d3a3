"""FlashRL's rollout precisions on stock vLLM: weights that can be updated in place, exactly, under any of them."""

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
    """A sentence when an engine was built before the family was enabled."""
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
    summary="quantized rollouts (fp8, int8) or plain ones (bf16) whose weights can be updated in place, exactly",
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
            "fp8", "what engines without an explicit quantization run in", tuple(fleet.SCHEMES)
        ),
        "fleet": Option([], "tables with a precision each, for the replicas in turn", kind=list, items=dict),
        "scheme": Option("", "vLLM's name of the quantization; empty: what the platform can run"),
        "profile": Option("", "absolute path of a profile that smooths the trainer's weights, for int8"),
        "lm_head": Option("", "float32: the lm_head computes in float32", ("", "float32")),
        "logprobs": Option(
            "processed",
            "processed: engines give logprobs after temperature, top-k and top-p; asked: as they were told",
            ("processed", "asked"),
        ),
        "exclude": Option([], "models (path patterns) that keep their own precision", kind=list),
        "atomic": Option(
            "layer",
            "layer: little memory, a failed update stops generation; model: nothing changes until commit",
            ("layer", "model"),
        ),
        "partial": Option(False, "accept updates that leave whole layers out", kind=bool),
        "in_flight": Option(
            "refuse",
            "requests running when an update comes: refuse the update, abort them, recompute them, or keep them",
            ("refuse", "abort", "recompute", "keep"),
        ),
        "tis": Option(
            "auto",
            "auto: verl's truncated importance sampling where rollouts are quantized and nobody chose; off: never",
            ("auto", "off"),
        ),
        "mismatch_jump": Option(
            4.0, "how many times the usual mismatch makes an update of verl suspect; 0: none is", kind=float
        ),
        "transfer_timeout": Option(
            600.0,
            "seconds of silence of the other side that a weight transfer of verl accepts; 0: any",
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
