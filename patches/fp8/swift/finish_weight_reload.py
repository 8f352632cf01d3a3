"""Let ms-swift hear that an update could not be committed."""

from __future__ import annotations

from typing import Any

from flashpatch.record import Contract, Patch


def on_finish(original, *args: Any, **kwargs: Any) -> Any:
    """Around ``finish_vllm_weight_reload``: raise what post-processing raises."""
    return original(*args, **{**kwargs, "strict": True})


PATCH = Patch(
    id="fp8.swift.finish_vllm_weight_reload",
    targets=("swift.rlhf_trainers.utils:finish_vllm_weight_reload",),
    requires="ms-swift>=4.6",
    wrapper=on_finish,
    contract=Contract(
        params=("vllm_model", "model_config", "target_device", "strict"),
        mentions=("model_loader_utils", "process_weights_after_loading"),
    ),
    evidence="optional",
    scope=frozenset({"worker"}),
    needs=("fp8.vllm.process_weights_after_loading",),
    why="ms-swift ends a sync with vLLM's post-processing and drops whatever that raises: a sync that left weights out "
    "returns, and with atomic='model' the old policy goes on answering.",
    how="Asks for the strict form, which ms-swift has and its worker does not use.",
    upstream="swift/rlhf_trainers/utils.py: finish_vllm_weight_reload(strict=False) passes over every exception.",
    remove_when="ms-swift's worker extension calls it with strict=True.",
)
