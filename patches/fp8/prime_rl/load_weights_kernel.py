"""Refuse prime-rl's transfer in the format of kernels, which writes into the parameters in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch


def on_load_weights_kernel(original, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Around ``load_weights_kernel``: refuse it for a model whose updates are followed here."""
    if model_registry.get(model) is not None:
        raise PatchError(
            "prime-rl copies weights in the format of kernels into the parameters in use, past load_weights",
            patch=PATCH.id,
            advice="Set quantize_in_weight_transfer to false; workers then quantize what comes in.",
        )
    return original(model, *args, **kwargs)


PATCH = Patch(
    id="fp8.prime_rl.load_weights_kernel",
    targets=("prime_rl.inference.vllm.worker.weight_transfer:load_weights_kernel",),
    requires="prime-rl>=0.8",
    wrapper=on_load_weights_kernel,
    contract=Contract(params=("model", "state_iter"), mentions=("param.copy_", "model.named_parameters")),
    evidence="optional",
    scope=frozenset({"worker"}),
    needs=("fp8.vllm.initialize_model",),
    tested=(),
    why="A transfer that breaks off leaves two policies, and one that does not leaves caches of the old one; nothing counts "
    "it as a version.",
    how="Refuses it; prime-rl's layerwise transfer goes on.",
    upstream="prime_rl/inference/vllm/worker/weight_transfer.py: load_weights_kernel.",
    remove_when="prime-rl's kernel format goes through an update of vLLM's that can fail as a whole.",
)
