"""Load buckets and checkpoints into the models of SGLang 0.5.12 through an update, and return errors as answers."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang import initialize_model, reload, weight_updater
from flashpatch.patches.fp8.sglang_0_5_12.record import FRAMEWORK, for_old_sglang
from flashpatch.record import Contract

RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"


def on_load(original, model: Any, weights: Any, target_device: Any):
    """Around ``load_weights_and_postprocess``: the first load, or an update from disk."""
    managed = model_registry.get(model)
    if managed is None:
        return original(model, weights, target_device)
    if managed.state == "loading":
        original(model, weights, target_device)
        return managed.end_first_load()
    reload.begin(managed, LOAD.id)
    model.load_weights(weights)
    return reload.commit(managed)


def on_tensor(original, self, named_tensors: Any, load_format: str | None = None):
    """Around ``update_weights_from_tensor``."""
    if model_registry.get(self.model) is None:
        return original(self, named_tensors, load_format)
    return weight_updater.load_bucket(
        named_tensors, load_format, TENSOR.id, lambda: original(self, named_tensors, load_format)
    )


def on_distributed(original, self, *args: Any, **kwargs: Any):
    """Around ``update_weights_from_distributed``: SGLang's own answer to an error says only that all is lost."""
    owner = model_registry.get(self.model)
    done, message = weight_updater.exception_as_answer(lambda: original(self, *args, **kwargs))
    if owner is not None and not done and message not in weight_updater.failures:
        weight_updater.failures.append(message)
    return done, message


def on_disk(original, self, model_path: str, *args: Any, **kwargs: Any):
    """Around ``update_weights_from_disk``."""
    owner = model_registry.get(self.model)
    if owner is None:
        return original(self, model_path, *args, **kwargs)
    return weight_updater.load_from_disk(
        owner, self.model_config, lambda: original(self, model_path, *args, **kwargs)
    )


def on_ipc(original, self, recv_req: Any):
    """Around ``update_weights_from_ipc``: the checkpoint engine processes quantized layers itself."""
    if model_registry.get(self.model) is None:
        return original(self, recv_req)
    return weight_updater.refuse_ipc(IPC.id)


LOAD = for_old_sglang(
    id=f"{FRAMEWORK}.load_weights_and_postprocess",
    targets=(f"{initialize_model.LOADER}:DefaultModelLoader.load_weights_and_postprocess",),
    wrapper=on_load,
    contract=Contract(params=("model", "weights", "target_device"), mentions=("quant_method",)),
    evidence="install",
    scope=frozenset({"worker"}),
    needs=(f"{FRAMEWORK}.initialize_model",),
    why="Run twice on processed weights, loading and post-processing raise, or corrupt them.",
    how="The first call is the first load; a later one, an update from disk, opens an update and commits it.",
)

_UPDATES = tuple(
    f"{FRAMEWORK}.runner_update_weights_from_{way}" for way in ("tensor", "distributed", "disk", "ipc")
)

_patch = partial(
    for_old_sglang,
    evidence="update",
    one_of=_UPDATES,  # an engine is updated through one of these functions
    scope=frozenset({"worker"}),
    needs=(f"{FRAMEWORK}.initialize_model",),
)

TENSOR = _patch(
    id=f"{FRAMEWORK}.runner_update_weights_from_tensor",
    targets=(f"{RUNNER}.update_weights_from_tensor",),
    wrapper=on_tensor,
    contract=Contract(params=("named_tensors", "load_format"), mentions=("self.model.load_weights",)),
    why=weight_updater.TENSOR.why,
    how=weight_updater.TENSOR.how,
)

DISTRIBUTED = _patch(
    id=f"{FRAMEWORK}.runner_update_weights_from_distributed",
    targets=(f"{RUNNER}.update_weights_from_distributed",),
    wrapper=on_distributed,
    contract=Contract(
        params=("names", "dtypes", "shapes", "group_name"), mentions=("self.model.load_weights",)
    ),
    why=weight_updater.DISTRIBUTED.why,
    how="Counts a failure, so that the update is not committed.",
)

DISK = _patch(
    id=f"{FRAMEWORK}.runner_update_weights_from_disk",
    targets=(f"{RUNNER}.update_weights_from_disk",),
    wrapper=on_disk,
    contract=Contract(
        params=("model_path", "load_format"),
        mentions=("self.model_config.model_path", "loader.load_weights_and_postprocess"),
    ),
    why=weight_updater.DISK.why,
    how=weight_updater.DISK.how,
)

IPC = _patch(
    id=f"{FRAMEWORK}.runner_update_weights_from_ipc",
    targets=(f"{RUNNER}.update_weights_from_ipc",),
    wrapper=on_ipc,
    contract=Contract(params=("recv_req",)),
    why=weight_updater.IPC.why,
    how=weight_updater.IPC.how,
)
