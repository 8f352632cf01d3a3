"""Compute the lm_head in float32 on vLLM 0.24 and 0.25. It goes when verl pins a newer vLLM.

Newer ones have ``head_dtype`` for models that generate. A group of its own: what newer versions do not need must not keep the other patches from them.
"""

from __future__ import annotations

from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError


@Patches(
    "fp8",
    "vllm>=0.24,<0.26",
    framework="vllm_0_24",
    scope="worker",
    evidence="optional",
    when="lm_head=float32 called=fp8.vllm.initialize_model",
    why="Logits in bf16 have steps of 1/8 from 16 on: the trainer's and the engine's fall on different ones, and each probability is "
    "off by percents. vLLM has a float32 head from 0.26 on.",
    remove_when="vLLM 0.26 is the oldest supported.",
).wrap(
    "vllm.model_executor.layers.logits_processor:LogitsProcessor._get_logits",
    relies_on="lm_head.quant_method.apply",
    params=("self", "hidden_states", "lm_head", "embedding_bias"),
    needs="fp8.vllm.initialize_model",
)
def get_logits(original, self, hidden_states: Any, lm_head: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiply the lm_head in float32, and let ranks gather that, with the option lm_head=float32; otherwise pass the
    call on.

    Raises PatchError if the head is quantized."""
    if engine.options("fp8")["lm_head"] == "float32":
        lm_head = _Float32Head(lm_head)
    return original(self, hidden_states, lm_head, *args, **kwargs)


class _Float32Head:
    """Stand for an lm_head, and for its quantization method, whose ``apply`` multiplies in float32."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self.quant_method = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def apply(self, layer: Any, hidden_states: Any, bias: Any = None) -> Any:
        """Return ``hidden_states @ weight.T + bias`` in float32; on CUDA without a float32 copy of the weight.

        Args:
            layer: this object.
            hidden_states: ``(tokens, hidden)``.
            bias: ``(vocabulary of this rank,)`` or None."""
        import torch

        method = type(self._head.quant_method).__name__
        if method not in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"):
            raise PatchError(
                f"the lm_head is quantized ({method}) and cannot be computed in float32.",
                **Patches.at(get_logits),
                advice="Unset fp8's option lm_head, or leave lm_head out of the checkpoint's quantization.",
            )
        weight = self._head.weight
        bias = None if bias is None else bias.float()
        if not hidden_states.is_cuda or weight.dtype == torch.float32:
            return torch.nn.functional.linear(hidden_states.float(), weight.float(), bias)
        logits = torch.mm(hidden_states, weight.t(), out_dtype=torch.float32)
        return logits if bias is None else logits + bias
