"""Follow the models of SGLang 0.5.12 to 0.5.20: their construction, their first load, and what is loaded into them later.

Errors of updates are answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.sglang import model as newer
from flashpatch.patches.fp8.sglang import weight_updater
from flashpatch.patches.fp8.sglang_0_5_12.record import (
    FRAMEWORK,
    NAMESPACES,
    as_newer,
    for_old_sglang,
    namespaces,
)

if TYPE_CHECKING:
    from flashpatch.patches.fp8.update.model import LoaderAdapter

LOADER = newer.LOADER
RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
"""Which updates its model itself before 0.5.16; from then on a part of it does."""
TP_RANK = "sglang.srt.distributed.parallel_state:get_tensor_model_parallel_rank"

patches = for_old_sglang(scope="worker", evidence="install")


@patches.wrap(
    f"{LOADER}:_initialize_model",
    relies_on=(
        f"{LOADER}:device_loading_context",
        "sglang.srt.distributed.parallel_state:get_tensor_model_parallel_world_size",
        "sglang.srt.distributed.parallel_state:get_tp_group",
        "sglang.srt.layers.radix_attention:RadixAttention",
        "sglang.srt.lora.layers:BaseLayerWithLoRA",
        "sglang.srt.model_loader.utils:set_default_torch_dtype",
        "sglang.srt.server_args:get_global_server_args",
    ),
    since=NAMESPACES,
    params=("model_config", "load_config", "quant_config"),
    undo=newer.stop_following,
    upstream=newer.patches.of(newer.initialize_model).upstream,
    **as_newer(newer.initialize_model),
)
def initialize_model(original, model_config: Any, load_config: Any, *args: Any, **kwargs: Any):
    """Record a model that exists, while nothing is loaded."""
    engine.require("fp8")
    model = original(model_config, load_config, *args, **kwargs)
    newer.manage(model, model_config, load_config, patches.of(initialize_model).id, adapter)
    return model


def adapter(model: Any, model_config: Any) -> LoaderAdapter:
    """Make the `LoaderAdapter` of a model that was just constructed."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_world_size
    from sglang.srt.server_args import get_global_server_args

    from flashpatch.patches.fp8.sglang import loader_adapter

    if namespaces() is not None:
        return loader_adapter.for_model(model, model_config)
    ranks = get_tensor_model_parallel_world_size()
    return loader_adapter.SglangAdapter(
        model, model_config, get_global_server_args().device, ranks, lambda: vars(get_global_server_args())
    )


@patches.wrap(
    f"{RUNNER}.load_model",
    relies_on=("self.model", "self.is_draft_worker", "self.model_config", TP_RANK, *newer.LAYERS),
    **as_newer(newer.load_model),
)
def load_model(original, self, *args: Any, **kwargs: Any):
    """End the first load, by whichever loader."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    ledger.role("worker", rank=get_tensor_model_parallel_rank())
    result = original(self, *args, **kwargs)
    newer.end_first_load(self, patches.of(load_model).id)
    return result


@patches.wrap(
    f"{LOADER}:DefaultModelLoader.load_weights_and_postprocess",
    since={"0.5.20": (f"{LOADER}:DefaultModelLoader.load_weights_only",)},
    why="Run twice on processed weights, loading and post-processing raise, or corrupt them.",
)
def load_weights_and_postprocess(original, model: Any, weights: Any, target_device: Any):
    """Let the first call be the first load; in a later one, an update from disk, open an update and commit it."""
    managed = model_registry.get(model)
    if managed is None:
        return original(model, weights, target_device)
    if managed.state == "loading":
        original(model, weights, target_device)
        return managed.end_first_load()
    newer.begin(managed, patches.of(load_weights_and_postprocess).id)
    _load(model, weights, target_device)
    return newer.commit(managed)


def _load(model: Any, weights: Any, target_device: Any) -> None:
    """Load without post-processing, which SGLang has a function for from 0.5.20 on."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if hasattr(DefaultModelLoader, "load_weights_only"):
        DefaultModelLoader.load_weights_only(model, weights, target_device)
    else:
        model.load_weights(weights)


update_patches = for_old_sglang(
    scope="worker",
    evidence="update",  # an engine is updated through one of these functions
    one_of=tuple(
        f"{FRAMEWORK}.runner_update_weights_from_{way}" for way in ("tensor", "distributed", "disk", "ipc")
    ),
)


def _owner(updater: Any) -> model_registry.ManagedModel | None:
    """Return the managed model of a runner, or of the part of one that updates it."""
    return model_registry.get(updater.get_model() if hasattr(updater, "get_model") else updater.model)


def _either(name: str) -> tuple[str, str]:
    return f"{weight_updater.UPDATER}.{name}", f"{RUNNER}.{name}"


@update_patches.wrap(
    *_either("update_weights_from_tensor"),
    relies_on="load_weights",
    **as_newer(weight_updater.update_weights_from_tensor),
)
def runner_update_weights_from_tensor(original, self, named_tensors: Any, load_format: str | None = None):
    """Answer with the error, if there is one."""
    if _owner(self) is None:
        return original(self, named_tensors, load_format)
    return weight_updater.load_bucket(
        named_tensors,
        load_format,
        update_patches.of(runner_update_weights_from_tensor).id,
        lambda: original(self, named_tensors, load_format),
    )


@update_patches.wrap(
    *_either("update_weights_from_distributed"),
    relies_on="load_weights",
    params=("names", "dtypes", "shapes", "group_name"),
    why=update_patches.of(weight_updater.load_weights_from_distributed).why,
)
def runner_update_weights_from_distributed(original, self, *args: Any, **kwargs: Any):
    """Count a failure, so that the update is not committed: SGLang's own answer to an error says only that all is lost."""
    owner = _owner(self)
    done, message = weight_updater.exception_as_answer(lambda: original(self, *args, **kwargs))
    if owner is not None and not done and message not in weight_updater.failures:
        weight_updater.failures.append(message)
    return done, message


@update_patches.wrap(
    *_either("update_weights_from_disk"),
    relies_on=("self.model_config.model_path", "loader.load_weights_and_postprocess"),
    params=("model_path", "load_format"),
    **as_newer(weight_updater.runner_update_weights_from_disk),
)
def runner_update_weights_from_disk(original, self, model_path: str, *args: Any, **kwargs: Any):
    """Answer with the first error, if there is one."""
    owner = _owner(self)
    if owner is None:
        return original(self, model_path, *args, **kwargs)
    return weight_updater.load_from_disk(
        owner, self.model_config, lambda: original(self, model_path, *args, **kwargs)
    )


@update_patches.wrap(*_either("update_weights_from_ipc"), **as_newer(weight_updater.update_weights_from_ipc))
def runner_update_weights_from_ipc(original, self, recv_req: Any):
    """Refuse the checkpoint engine."""
    if _owner(self) is None:
        return original(self, recv_req)
    return weight_updater.refuse_ipc(update_patches.of(runner_update_weights_from_ipc).id)
