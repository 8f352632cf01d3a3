"""Follow the models that vLLM constructs (FlashRL's Record1), and mend what its loaders do to drafters and to buckets."""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch import engine
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import having
from flashpatch.patches.fp8 import model_registry

if TYPE_CHECKING:
    import torch


logger = logging.getLogger("flashpatch.fp8")

_NO_EXPERTS = re.compile(r"\b(int8|fp8) (fused )?moe\b", re.IGNORECASE)  # in vLLM's errors
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_under_construction = threading.local()

patches = Patches("fp8", "vllm>=0.24", scope="worker")


@patches.register(
    "vllm.model_executor.model_loader.utils:initialize_model",
    relies_on=(
        "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase.process_weights_after_loading",
        "vllm.config:set_current_vllm_config",
        "vllm.distributed.parallel_state:get_tp_group",
        "vllm.model_executor.parameter:ChannelQuantScaleParameter",
        "vllm.model_executor.parameter:PerTensorScaleParameter",
    ),
    since={"0.28": ("vllm.model_executor.layers.attention:is_deferred_attention_layer",)},
    params=("vllm_config", "prefix", "model_class", "model_config"),
    evidence="install",
    why="After post-processing, vLLM's parameters have lost their loaders, shapes and names: a second load fails or writes into "
    "the wrong layout.",
    upstream="vllm/model_executor/model_loader/reload records metadata too, but not state outside parameters.",
    remove_when="vLLM's own reload is exact for tied, MoE and int8 models and for buckets that cut a fused layer.",
)
def initialize_model(site: Site) -> Callable[[], None]:
    """Record every parameter and buffer, and the Python state around it, as the constructor made it, and route the model's
    load_weights through an update; if the precision needs it, round bf16 values before the loaders of 8-bit parameters."""
    site.wrap(_initialize)

    def take_away() -> None:
        model_registry.restore_load_weights()
        site.unwrap()

    return take_away


def _initialize(original, vllm_config: Any, *, model_config: Any = None, **kwargs: Any):
    """Construct a model. A multimodal one constructs its language model by the same function; it is a part of the whole."""
    if getattr(_under_construction, "outer", False):
        return original(vllm_config, model_config=model_config, **kwargs)
    with having(_under_construction, "outer", True):
        return _construct(original, vllm_config, model_config=model_config, **kwargs)


def _construct(original, vllm_config: Any, *, model_config: Any, **kwargs: Any):
    from flashpatch.patches.fp8.precision import quantize_on_load
    from flashpatch.patches.fp8.update.model import ManagedModel
    from flashpatch.patches.fp8.vllm import int8_config, loader_adapter

    engine.require("fp8")
    marked = int8_config.read_mark(model_config or vllm_config.model_config)
    try:
        model = original(vllm_config, model_config=model_config, **kwargs)
    except (NotImplementedError, ValueError) as error:
        missing = _NO_EXPERTS.search(str(error))
        if missing is None:
            raise
        raise _no_experts(missing[1].lower(), str(error)) from error
    _refuse_experts(model)
    if hasattr(model, "load_weights"):
        _refuse_amx_mla(model)
        adapter = loader_adapter.VllmAdapter(vllm_config, model_config or vllm_config.model_config)
        rounding = quantize_on_load.for_model(model, marked) if marked is not None else None
        model_registry.add(model, ManagedModel(model, adapter, engine.options("fp8"), rounding))
    return model


def _refuse_experts(model: Any) -> None:
    """Refuse fp8 experts without a kernel: except on CUDA and ROCm vLLM notices once they have been loaded."""
    for name, module in model.named_modules():
        backend = getattr(getattr(module, "quant_method", None), "fp8_backend", None)
        if getattr(backend, "value", None) == "NONE":
            raise _no_experts("fp8", f"{name} has none")


def _no_experts(form: str, reason: str) -> PatchError:
    return PatchError(
        f"vLLM has no kernel here for experts in {form}: {reason}",
        patch=patches.of(initialize_model).id,
        advice="Use bf16 for this model; on x86 vLLM's kernels for experts in 8 bits need a CPU with AMX.",
    )


def _refuse_amx_mla(model: torch.nn.Module) -> None:
    """Refuse a model of DeepSeek's attention on vLLM's backend AMX_MLA, for CPUs with AMX.

    It packs the weight of ``kv_b_proj`` into the attention's own memory and frees the weight itself: a later load finds no
    place for it."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "impl", None), "uses_amx_bmm", False):
            raise PatchError(
                f"{name} runs on the attention backend AMX_MLA, whose weights cannot be updated in place.",
                patch=patches.of(initialize_model).id,
                advice="Open the engine with attention_backend='CPU_MLA' (--attention-backend CPU_MLA).",
            )


@patches.wrap(
    "vllm.model_executor.model_loader:get_model",
    relies_on=(
        "vllm.config.speculative:SpeculativeConfig.draft_load_config",
        "vllm.config.speculative:SpeculativeConfig.draft_model_config",
    ),
    evidence="optional",  # an engine may have no drafter
    why="With load_format='dummy', as trainers open engines, a pretrained drafter is never loaded: no update of the "
    "policy brings it. A speculative config's draft_load_config is ignored for draft models.",
    remove_when="vLLM keeps load_format='dummy' from pretrained drafters, and heeds draft_load_config for all methods.",
)
def get_model(
    original, *, vllm_config: Any, model_config: Any = None, load_config: Any = None, **kwargs: Any
):
    """Load a drafter from its checkpoint, or as draft_load_config says.

    Trainers open engines with ``load_format="dummy"``, since their first update brings the policy. vLLM uses the same format
    for the drafter, whose weights no update brings: it would stay random."""
    from flashpatch.patches.fp8.vllm import loader_adapter

    chosen = model_config or vllm_config.model_config
    if loader_adapter.is_drafter(vllm_config, chosen):
        load_config = _of_drafter(vllm_config, chosen, load_config)
    return original(vllm_config=vllm_config, model_config=model_config, load_config=load_config, **kwargs)


def _of_drafter(vllm_config: Any, model_config: Any, load_config: Any) -> Any:
    """Return the drafter's ``LoadConfig``: the user's if one is set, else never dummies for a pretrained one."""
    speculative = vllm_config.speculative_config
    if speculative.draft_load_config is not None:
        return load_config or speculative.draft_load_config
    inherited = load_config or vllm_config.load_config
    if inherited.load_format != "dummy" or not _pretrained(model_config):
        return load_config
    logger.info("load_format='dummy' is for the policy: the drafter is loaded from %s", model_config.model)
    own = copy.copy(inherited)
    own.load_format = "auto"
    return own


def _pretrained(drafter: Any) -> bool:
    """Whether a drafter has weights to load, in a checkpoint of its own or, as an MTP head, in the target's."""
    folder = Path(drafter.model)
    return not folder.is_dir() or any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)


_LOADER = "vllm.model_executor.models.utils:AutoWeightsLoader"


def native(site: Site) -> str | None:
    """Return what needs no patch: vLLM 0.28's loader checks nothing of the kind."""
    return "a loader without that check" if site.target.endswith(".load_weights") else None


@patches.wrap(
    f"{_LOADER}._check_skipped_aliases",
    f"{_LOADER}.load_weights",
    relies_on=f"{_LOADER}.load_weights",
    params=(),
    native=native,
    evidence="optional",  # models of their own loaders never ask
    why="Trainers send lm_head of a tied model too, often in the last bucket; vLLM refuses a load that has it without "
    "the embedding, though the embedding came in an earlier bucket.",
    remove_when="vLLM checks a whole update rather than one call of load_weights.",
)
def check_skipped_aliases(original, self, autoloaded_weights: set[str], *args: Any, **kwargs: Any):
    """Skip vLLM's check within an update, whose own completeness is checked at its end."""
    for managed in model_registry.all_models():
        if managed.inside_load and managed.state != "loading":
            return None
    return original(self, autoloaded_weights, *args, **kwargs)
