"""Let ms-swift hear that an update could not be committed."""

from __future__ import annotations

from typing import Any

from flashpatch.decorate import Patches


@Patches(
    "fp8",
    "ms-swift>=4.6",
    framework="swift",
    scope="worker",
    evidence="optional",
    why="ms-swift ends a sync with vLLM's post-processing and drops whatever that raises: a sync that left weights out "
    "returns, and with atomic='model' the old policy goes on answering.",
    upstream="swift/rlhf_trainers/utils.py: finish_vllm_weight_reload(strict=False) passes over every exception.",
    remove_when="ms-swift's worker extension calls it with strict=True.",
).wrap(
    "swift.rlhf_trainers.utils:finish_vllm_weight_reload",
    relies_on=("model_loader_utils", "process_weights_after_loading"),
    params=("vllm_model", "model_config", "target_device", "strict"),
    needs="fp8.vllm.process_weights_after_loading",
)
def finish_vllm_weight_reload(original, *args: Any, **kwargs: Any) -> Any:
    """Ask for the strict form, which ms-swift has and its worker does not use."""
    return original(*args, **{**kwargs, "strict": True})
