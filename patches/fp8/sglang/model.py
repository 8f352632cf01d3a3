"""Follow SGLang's models: record each when it is constructed (FlashRL's Record1), and make one update of each later load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.sglang.engine_args import INT8
from flashpatch.patches.fp8.sglang.schedulers import REMOVE_WHEN
from flashpatch.patches.fp8.update import events
from flashpatch.patches.fp8.update.events import ASLEEP

if TYPE_CHECKING:
    import torch

    from flashpatch.patches.fp8.update.model import LoaderAdapter

logger = logging.getLogger("flashpatch.fp8")

LOADER = "sglang.srt.model_loader.loader"
LAYERS = (
    "sglang.srt.layers.linear:LinearBase",
    "sglang.srt.layers.quantization.unquant:UnquantizedLinearMethod",
)
NATIVE = "SGLang's load_format=flash_rl"

_single: set[model_registry.ManagedModel] = set()
_attempted: dict[model_registry.ManagedModel, str] = {}  # why the attempt could not begin; empty: it could


def stop_following(site: Site) -> None:
    """Give models their own load_weights back, and construct others unseen."""
    model_registry.restore_load_weights()
    site.unwrap()


patches = Patches("fp8", "sglang>=0.5.21", scope="worker", evidence="install", remove_when=REMOVE_WHEN)


@patches.wrap(
    f"{LOADER}:_initialize_model",
    relies_on=(
        f"{LOADER}:device_loading_context",
        "sglang.srt.distributed.parallel_state:get_tp_group",
        "sglang.srt.layers.radix_attention:RadixAttention",
        "sglang.srt.lora.layers:BaseLayerWithLoRA",
        "sglang.srt.model_loader.utils:set_default_torch_dtype",
        "sglang.srt.runtime_context:get_device",
        "sglang.srt.runtime_context:get_exec",
        "sglang.srt.runtime_context:get_memory",
        "sglang.srt.runtime_context:get_lora",
        "sglang.srt.runtime_context:get_parallel",
    ),
    params=("model_config", "load_config", "quant_config"),
    undo=stop_following,
    why="After post-processing, SGLang's parameters have lost their loaders and shapes: an update raises in the "
    "scheduler, which ends the engine.",
    upstream="QuantizedRLModelLoader (load_format=flash_rl): fp8 on Qwen2 and Qwen3, whole fused layers only.",
)
def initialize_model(original, model_config: Any, load_config: Any, *args: Any, **kwargs: Any):
    """Record every parameter and buffer, and the Python state around it, as the constructor made it, and route the model's
    load_weights through an update. Stand aside for load_format=flash_rl."""
    from flashpatch.patches.fp8.sglang import loader_adapter

    engine.require("fp8")
    model = original(model_config, load_config, *args, **kwargs)
    manage(model, model_config, load_config, patches.of(initialize_model).id, loader_adapter.for_model)
    return model


def manage(
    model: Any,
    model_config: Any,
    load_config: Any,
    patch: str,
    adapter_for: Callable[[Any, Any], LoaderAdapter],
) -> None:
    """Follow a model that was just constructed, unless SGLang's own loader for changing weights has it.

    Args:
        model: nothing is loaded.
        model_config, load_config: SGLang's, of this model.
        patch: id of the patch that stands aside then.
        adapter_for: makes the adapter from model and configuration."""
    from flashpatch.patches.fp8.precision.quantize_on_load import Rounding
    from flashpatch.patches.fp8.update.model import ManagedModel

    form = load_config.load_format
    if getattr(form, "value", form) == "flash_rl":
        logger.warning("updates of %s are left to %s", type(model).__name__, NATIVE)
        ledger.note(superseded={patch: NATIVE})
    elif hasattr(model, "load_weights"):
        rounding = Rounding(model) if model_config.quantization == INT8 else None
        adapter = adapter_for(model, model_config)
        if getattr(form, "value", form) == "dummy":
            adapter.stands_for = model_config.model_path
        model_registry.add(model, ManagedModel(model, adapter, engine.options("fp8"), rounding))


@patches.wrap(
    "sglang.srt.model_executor.model_runner:ModelRunner.load_model",
    relies_on=("self.model", "self.is_draft_worker", "self.model_config", *LAYERS),
    why="A process must be known as a worker, with its rank, for its absence to be noticed.",
)
def load_model(original, self, *args: Any, **kwargs: Any):
    """Write role and rank to the ledger, end the first load, by whichever loader, and check that layers are quantized."""
    from sglang.srt.runtime_context import get_parallel

    ledger.role("worker", rank=get_parallel().tp_rank)
    result = original(self, *args, **kwargs)
    end_first_load(self, patches.of(load_model).id)
    return result


def end_first_load(runner: Any, patch: str) -> None:
    """End the first load of a model runner's model, and check that the policy is quantized as asked for. Raises
    PatchError, see `fleet.check_quantized`; it names ``patch``."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    model_registry.end_first_loads()
    quantization = runner.model_config.quantization
    if model_registry.get(runner.model) is not None and not runner.is_draft_worker:
        fleet.check_quantized(runner.model, quantization, (LinearBase, UnquantizedLinearMethod), patch)
        ledger.note(quantization=quantization)


@patches.wrap(
    f"{LOADER}:DefaultModelLoader.restore_weights_before_loading",
    evidence="update",
    why="Few quantization methods can undo their packing; for the others SGLang goes on with packed parameters.",
)
def restore_weights_before_loading(original, model: torch.nn.Module, target_device: Any):
    """Open an update in place of undoing a layer's packing, for begin_weight_update and update_weights_from_disk."""
    managed = model_registry.get(model)
    if managed is None or managed.state == "loading":
        return original(model, target_device)
    begin(managed, patches.of(restore_weights_before_loading).id)
    return None


def begin(managed: model_registry.ManagedModel, patch: str) -> None:
    """Open an update, within `one_attempt` only once. Raises PatchError, which names ``patch``, if it cannot begin,
    and for a second one, with the reason why the first failed."""
    if managed in _attempted and managed.asleep:
        raise PatchError(ASLEEP[0], patch=patch, advice=ASLEEP[1])
    if managed in _attempted:
        why = _attempted[managed] or managed.error or "the update failed"
        raise PatchError(why, patch=patch, advice="Send a complete update.")
    if managed in _single:
        _attempted[managed] = ""
    try:
        managed.begin()
    except PatchError as error:
        if managed in _attempted:
            _attempted[managed] = error.problem
        raise


@contextmanager
def one_attempt(managed: model_registry.ManagedModel) -> Iterator[None]:
    """Allow one update within: SGLang's rollback would load the same weights again."""
    _single.add(managed)
    try:
        yield
    finally:
        _single.discard(managed)
        _attempted.pop(managed, None)


@patches.wrap(
    f"{LOADER}:DefaultModelLoader.postprocess_weights",
    relies_on="quant_method",
    why="Run twice on processed weights, post-processing corrupts them.",
)
def postprocess_weights(original, model: torch.nn.Module, target_device: Any):
    """End the first load with the first call; with later ones commit the open update and never process twice."""
    managed = model_registry.get(model)
    if managed is None:
        return original(model, target_device)
    if managed.state == "loading":
        original(model, target_device)
        managed.end_first_load()
        return None
    commit(managed)
    return None


def commit(managed: model_registry.ManagedModel) -> None:
    """Commit the open update, and write down what became of it."""
    try:
        managed.finish()
    finally:
        events.note(managed)
        ledger.flush()  # SGLang ends its processes by SIGKILL
