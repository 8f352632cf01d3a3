"""Refuse prime-rl's transfer in the format of kernels, which writes into the parameters in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import model_registry

if TYPE_CHECKING:
    import torch


@Patches(
    "fp8",
    "prime-rl>=0.8",
    framework="prime_rl",
    scope="worker",
    evidence="optional",
    why="A transfer that breaks off leaves two policies, and one that does not leaves caches of the old one; nothing "
    "counts it as a version.",
    upstream="prime_rl/inference/vllm/worker/weight_transfer.py: load_weights_kernel.",
    remove_when="prime-rl's kernel format goes through an update of vLLM's that can fail as a whole.",
).wrap(
    "prime_rl.inference.vllm.worker.weight_transfer:load_weights_kernel",
    relies_on=("param.copy_", "model.named_parameters"),
    params=("model", "state_iter"),
    needs="fp8.vllm.initialize_model",
    tested=(),
)
def load_weights_kernel(original, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Refuse the transfer for a model whose updates are followed here; prime-rl's layerwise transfer goes on."""
    if model_registry.get(model) is not None:
        raise PatchError(
            "prime-rl copies weights in the format of kernels into the parameters in use, past load_weights",
            patch=Patches.of(load_weights_kernel).id,
            advice="Set quantize_in_weight_transfer to false; workers then quantize what comes in.",
        )
    return original(model, *args, **kwargs)
