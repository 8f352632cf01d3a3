"""Set the family's precision, and its logprobs, on engines opened without an explicit quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.vllm import client, int8_config, unsupported

if TYPE_CHECKING:
    import torch


@Patches(
    "fp8",
    "vllm>=0.24",
    scope="driver",
    evidence="install",
    why="Rollout scripts open their engine in bf16 and ask for logprobs before temperature; vLLM has int8 kernels, but "
    "only for checkpoints that are int8 already.",
    remove_when="never: this is the switch itself.",
).wrap(
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    relies_on=(
        "self.model",
        "vllm.transformers_utils.config:get_config",
        "vllm.engine.arg_utils:EngineArgs.hf_overrides",
        "vllm.engine.arg_utils:EngineArgs.logprobs_mode",
        "vllm.engine.arg_utils:EngineArgs.quantization_config",
        "vllm.config.quantization:resolve_quantization_config",
        "vllm.model_executor.layers.linear:LinearBase",
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
    ),
)
def create_engine_config(original, self, *args: Any, **kwargs: Any):
    """Set quantization if it is unset, the checkpoint is not quantized and the model is not excluded; for int8 describe
    a compressed-tensors checkpoint over the model's config. Ask for processed logprobs if no others are asked for."""
    engine.require("fp8")
    ledger.role("driver")
    options = engine.options("fp8")
    if not fleet.is_excluded(self.model, options):
        _choose(self, options)
        _set_logprobs(self, options)
    config = original(self, *args, **kwargs)
    if problem := unsupported.at_start(config):
        raise PatchError(
            problem,
            patch=Patches.of(create_engine_config).id,
            advice="Or open this engine without FlashPatch.",
        )
    parallel = config.parallel_config
    if parallel.distributed_executor_backend != "external_launcher":  # whose ranks are started side by side
        at = f"{parallel.master_addr}:{parallel.master_port}" if parallel.nnodes > 1 else ""
        ledger.opens_engine(at)
    ledger.note(quantization=config.model_config.quantization)
    client.opened_with(config)
    return config


def check_quantized(model: torch.nn.Module, model_config: Any) -> None:
    """Refuse an engine whose quantization left every linear layer as it was."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    patch, kinds = Patches.of(create_engine_config).id, (LinearBase, UnquantizedLinearMethod)
    fleet.check_quantized(model, model_config.quantization, kinds, patch)


def _choose(args: Any, options: Any) -> None:
    """Set the quantization of this engine if the caller has not; in a mixed fleet, that of its replica."""
    entries = fleet.entries(options["precision"], options["scheme"], options["fleet"])
    own = None if int8_config.is_marked(args) else _own_quantization(args)
    if args.quantization == "fp8" and not own:
        _set_scheme(args, fleet.current_name("fp8"))
    if len(entries) == 1:
        [entry] = entries
        if entry.quantization != "" and args.quantization is None and not int8_config.is_marked(args):
            if own:
                int8_config.configure_template(args, own, options["profile"])
            else:
                _give(args, entry, options)
        ledger.note(precision=entry.precision)
        return
    place = fleet.place(args)
    entry = fleet.assigned(entries, place.rank)
    wanted = (fleet.default_scheme() if entry.quantization is None else entry.quantization) or None
    asked = "the checkpoint's own" if own else args.quantization
    if asked not in (None, wanted):
        raise PatchError(
            f"replica {place.rank} of the fleet is to run in {entry.precision}, and its quantization is {asked}.",
            patch=Patches.of(create_engine_config).id,
            advice="Leave quantization to the fleet, start from the bf16 model, or name this model in exclude_models.",
        )
    if wanted is None or args.quantization is not None:
        args.quantization = wanted
    else:
        _give(args, entry, options)
    ledger.note(
        precision=entry.precision,
        fleet={
            "replica": place.rank,
            "known_by": place.source,
            "entry": place.rank % len(entries),
            "entries": [other.precision for other in entries],
        },
    )


def _give(args: Any, entry: fleet.Entry, options: Any) -> None:
    """Open a bf16 checkpoint in the entry's precision."""
    fleet.announce(args.model, entry.precision, options)
    if entry.precision == "int8":
        int8_config.configure(args, options["profile"])
    elif entry.precision == "int8_weight_only":
        int8_config.configure_weight_only(args)
    else:
        _set_scheme(args, entry.quantization or fleet.default_scheme())


def _set_scheme(args: Any, scheme: str) -> None:
    """Set one of vLLM's schemes, with what its name stands for, which older versions do not look up later."""
    from vllm.config.quantization import resolve_quantization_config

    args.quantization = scheme
    args.quantization_config = resolve_quantization_config(scheme, args.quantization_config)


def _own_quantization(args: Any) -> Any:
    """Return the checkpoint's own quantization config (vLLM then follows it), or None."""
    from vllm.transformers_utils.config import get_config

    if isinstance(args.hf_overrides, Mapping) and args.hf_overrides.get("quantization_config"):
        return args.hf_overrides["quantization_config"]
    path, form = args.hf_config_path or args.model, args.config_format
    config = get_config(path, args.trust_remote_code, args.revision, config_format=form)
    for part in (config, getattr(config, "text_config", config)):
        for name in ("quantization_config", "compression_config"):
            if getattr(part, name, None):
                return getattr(part, name)
    return None


def _set_logprobs(args: Any, options: Mapping[str, Any]) -> None:
    """Set ``logprobs_mode`` of ``EngineArgs``, in place, if it is at vLLM's default, and the head's dtype if requested.
    An importance ratio needs the probability with which a token was sampled: after temperature, top-k and top-p. vLLM's
    default are logprobs before them."""
    if options["logprobs"] == "processed" and args.logprobs_mode == "raw_logprobs":
        args.logprobs_mode = "processed_logprobs"
    if options["lm_head"] == "float32":
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        if hasattr(LogitsProcessor, "_apply_head"):  # before vLLM 0.26 `vllm_0_24` does it
            int8_config.override(args, "head_dtype", "float32")
        ledger.note(lm_head="float32")
    ledger.note(logprobs=args.logprobs_mode)
