"""Open a bf16 checkpoint in int8: describe it to vLLM as compressed-tensors W8A8.

vLLM builds such layers from the ``quantization_config`` of a checkpoint. `configure` writes one over the config of a
bf16 model, with a mark for the workers, whose loaders then round the weights (`quantize_on_load`): at the first load and
at every update. A checkpoint that is W8A8 already only gets the mark."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.errors import PatchError

logger = logging.getLogger("flashpatch.fp8")

PATCH = "fp8.vllm.create_engine_config"
MARK = "flashpatch"
"""Key in a ``quantization_config`` under which workers find `mark`."""

#: Layers that stay in bf16, as patterns of compressed-tensors: the head, routers, and towers beside the language model.
KEPT = (
    "lm_head",
    r"re:.*\.lm_head$",
    r"re:.*gate$",
    r"re:.*\.router(\..*)?$",
    r"re:(.*\.)?(visual|vision\w*|audio\w*|multi_modal_projector|mm_projector)\..*",
)


def configuration(kept: tuple[str, ...] = KEPT) -> dict[str, Any]:
    """Describe int8 W8A8 to compressed-tensors: a scale per output channel, activations per token."""

    def values(strategy: str, dynamic: bool) -> dict[str, Any]:
        return dict(num_bits=8, type="int", strategy=strategy, dynamic=dynamic, symmetric=True)

    group = dict(
        targets=["Linear"], weights=values("channel", False), input_activations=values("token", True)
    )
    return dict(
        quant_method="compressed-tensors",
        format="int-quantized",
        quantization_status="compressed",
        ignore=list(kept),
        config_groups=dict(group_0=group),
    )


def mark(profile: str = "", at_load: bool = True) -> dict[str, Any]:
    """Return what workers need to round weights: the absolute path of a ``profile`` that smooths them, or empty, and
    whether the first load brings unsmoothed ones; a template is smoothed already."""
    return {"profile": profile, "at_load": at_load}


def read_mark(model_config: Any) -> Mapping[str, Any] | None:
    """Return the mark in ``vllm.config.ModelConfig``, in any process; None if there is none."""
    written = getattr(model_config.hf_config, "quantization_config", None)
    return written.get(MARK) if isinstance(written, Mapping) else None


def is_marked(args: Any) -> bool:
    """Whether these ``EngineArgs`` carry the mark already."""
    written = args.hf_overrides.get("quantization_config") if isinstance(args.hf_overrides, Mapping) else None
    return isinstance(written, Mapping) and MARK in written


def configure(args: Any, profile: str) -> None:
    """Open this engine, of ``EngineArgs`` that are changed in place, in int8, on weights in bf16; ``profile`` is the
    family's option. Raises PatchError if the overrides cannot take another key, or the profile is not of this model."""
    if inexact():
        logger.warning(
            "this CPU has no VNNI: vLLM's int8 kernel (oneDNN) is less exact here than int8 is, by two to four times "
            "per layer. Suitable for trials, not for judging int8"
        )
        ledger.note(int8="inexact: no VNNI")
    kept = (*KEPT, *_unquantized(args, profile)) if profile else KEPT
    args.quantization = "compressed-tensors"
    override(args, "quantization_config", {**configuration(kept), MARK: mark(profile)})


def configure_template(args: Any, own: Any, profile: str) -> None:
    """Mark an 8-bit checkpoint, so that the trainer's weights are rounded as it is. Raises PatchError if a profile is
    set, and this checkpoint is none that weights are rounded into."""
    if (
        isinstance(own, Mapping)
        and own.get("quant_method") == "compressed-tensors"
        and not callable(args.hf_overrides)
        and not _narrow_in_8_bits(own)
    ):
        if profile:
            check_path(profile)
        override(args, "quantization_config", {**own, MARK: mark(profile, at_load=False)})
    elif profile:
        raise _refuse(
            "a profile is set, and the checkpoint is quantized otherwise than by compressed-tensors in 8 bits.",
            "Unset the option profile, or open the bf16 model.",
        )


def _narrow_in_8_bits(own: Mapping[str, Any]) -> bool:
    """Whether layers hold 4-bit weights unpacked, one in each int8, into which 8-bit values must not be rounded."""
    for group in (own.get("config_groups") or {}).values():
        bits = (group.get("weights") or {}).get("num_bits", 8)
        if bits < 8 and "pack" not in str(group.get("format") or own.get("format")):
            return True
    return False


def configure_weight_only(args: Any) -> None:
    """Open this engine with int8 weights and bf16 activations, by torchao. Raises PatchError if torchao is not
    installed, or the overrides cannot take another key."""
    if find_spec("torchao") is None:
        raise _refuse(
            "int8_weight_only needs torchao, which is not installed.", "Install torchao, or use int8."
        )
    args.quantization = "torchao"
    kind = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}
    override(args, "quantization_config_dict_json", json.dumps(kind))


def override(args: Any, key: str, value: Any) -> None:
    """Set one key of ``hf_overrides``, in addition to the caller's. Raises PatchError if the caller's overrides are a
    function, or have this key."""
    theirs = args.hf_overrides or {}
    if not isinstance(theirs, Mapping):
        raise _refuse("hf_overrides is a function.", "Give hf_overrides as a dict, or use exclude_models.")
    if key in theirs and theirs[key] != value:
        raise _refuse(f"hf_overrides has {key!r} already.", f"Remove {key!r} from it, or use exclude_models.")
    args.hf_overrides = {**theirs, key: value}


def inexact() -> bool:
    """Whether vLLM's int8 kernel rounds its products here: oneDNN's does on an x86 CPU without VNNI."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_vnni", "avx_vnni"} & set(flags)


def check_path(profile: str) -> None:
    """Raise `PatchError` unless ``profile`` is the absolute path of a file."""
    if not Path(profile).is_absolute() or not Path(profile).is_file():
        raise _refuse(
            f"the profile {profile[:200]!r} is not an absolute path of a file.",
            "Workers have directories of their own: give an absolute path.",
        )


def _unquantized(args: Any, profile: str) -> tuple[str, ...]:
    """Return modules whose weights the profile leaves unquantized. Raises `PatchError` if it is of another model or not for int8."""
    from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint
    from flashpatch.patches.fp8.calibration.profile_file import load

    check_path(profile)
    found = load(Path(profile))
    if (found.form, found.granularity) != ("int8", "channel"):
        raise _refuse(
            f"the profile is for {found.form} with a scale per {found.granularity}.",
            "Make one for int8 with a scale per channel.",
        )
    with Checkpoint(args.model) as checkpoint:
        if found.fingerprint and found.fingerprint != checkpoint.fingerprint():
            raise _refuse(
                "the profile is of another model.", "Make one of this model with 'flashpatch profile'."
            )
        matrices = [
            name for name, shape in checkpoint.shapes.items() if len(shape) == 2 and name.endswith(".weight")
        ]
        return tuple(name.removesuffix(".weight") for name in matrices if name not in found.quantized)


def _refuse(problem: str, advice: str) -> PatchError:
    return PatchError(problem, patch=PATCH, advice=advice)
