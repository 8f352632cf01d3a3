"""Set the family's precision on engines opened without an explicit quantization."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.precision import fleet

#: SGLang's name of int8 weights with a scale per row, and of activations with one per token.
INT8 = "w8a8_int8"

#: The family's precision to SGLang's name; None: no quantization.
QUANTIZATIONS = {"bf16": None, "fp8": "fp8", "int8": INT8}

GET_CONFIG = "sglang.srt.utils.hf_transformers_utils:get_config"
DECLARE = "sglang.srt.arg_groups.overrides:declare_resolution"


@Patches(
    "fp8",
    "sglang>=0.5.21",
    scope="driver",
    evidence="optional",
    when="called=fp8.sglang.launch_scheduler_processes",
    why="Rollout scripts open their engine in bf16; asking for online fp8 means editing each of them.",
    remove_when="never: this is the switch itself.",
).wrap("sglang.srt.arg_groups.pipeline:run_resolution_pipeline", relies_on=(DECLARE, GET_CONFIG))
def run_resolution_pipeline(original, server_args: Any):
    """Declare quantization, as SGLang's own resolvers do, if it is unset, the checkpoint is not quantized and the model is not
    excluded.

    SGLang calls this once, before anything is derived from the arguments."""
    declare(server_args, run_resolution_pipeline, fields_for(server_args, run_resolution_pipeline))
    return original(server_args)


def declare(args: Any, function: Callable[..., Any], fields: Mapping[str, Any]) -> None:
    """Declare values that `fields_for` returned, in the name of ``function``'s patch."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    if fields:
        declare_resolution(args, Patches.of(function).id, **fields)


def fields_for(args: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that give an engine of these ``ServerArgs`` the family's precision, and a float32 head if
    that is asked for; empty if the model keeps its own. Raises PatchError, which names ``function``'s patch, if SGLang
    does not have this precision."""
    engine.require("fp8")
    ledger.role("driver")
    ledger.opens_engine(str(args.dist_init_addr) if args.nnodes > 1 else "")
    options = engine.options("fp8")
    if fleet.is_excluded(args.model_path, options):
        return {}

    head = {"enable_fp32_lm_head": True} if options["lm_head"] == "float32" else {}
    return head | _precision_for(args, function, options)


def _precision_for(args: Any, function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, str]:
    def refuse(problem: str, advice: str) -> PatchError:
        return PatchError(problem, **Patches.at(function), advice=advice)

    entries = fleet.entries(options["precision"], options["scheme"], options["fleet"])
    if len(entries) > 1 and fleet.VERL_REPLICA_RANK not in os.environ:
        raise refuse(
            "a fleet of several precisions needs replicas with numbers, which SGLang's engines have under verl alone",
            f"Use one precision, or number each replica in {fleet.VERL_REPLICA_RANK}.",
        )
    place = fleet.place(None) if len(entries) > 1 else fleet.Place(0, "the only precision")
    entry = fleet.assigned(entries, place.rank)
    precision, scheme = entry.precision, entry.scheme
    ledger.note(precision=precision)
    if args.quantization is not None or _has_own_quantization(args):
        if len(entries) > 1:
            raise refuse(
                f"this replica of the fleet is to run in {precision}, and its quantization is set already",
                "Leave quantization to the fleet, start from the bf16 model, or name this model in exclude_models.",
            )
        return {}
    if not scheme and precision not in QUANTIZATIONS:
        raise refuse(
            f"precision {precision!r} is not available on SGLang, which chooses fp8 scales itself",
            "Use fp8, or open the engine on a quantized checkpoint.",
        )
    chosen = scheme or QUANTIZATIONS[precision]
    if chosen is None:
        return {}
    if options["profile"] and chosen == INT8:
        raise refuse("smoothing profiles are not applied on SGLang", "Leave the option profile out there.")
    fleet.announce(args.model_path, precision, options)
    fields = {"quantization": chosen}
    if args.speculative_draft_model_path and args.speculative_draft_model_quantization is None:
        fields["speculative_draft_model_quantization"] = "unquant"  # a drafter keeps its precision by default
    return fields


def _has_own_quantization(args: Any) -> bool:
    """Whether the checkpoint is quantized already (SGLang then follows its configuration).

    Without a configuration to read (SGLang's ``dummy`` and ``none``) there is nothing to quantize either."""
    if str(args.model_path).lower() in ("none", "dummy"):
        return True
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(args.model_path, trust_remote_code=args.trust_remote_code, revision=args.revision)
    text = getattr(config, "text_config", config)
    return any(
        getattr(c, "quantization_config", None) or getattr(c, "compression_config", None)
        for c in (config, text)
    )
