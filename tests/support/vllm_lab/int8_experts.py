"""int8 kernels for experts on a CPU to which vLLM's own selection gives none.

vLLM 0.31 and 0.32 give x86 CPUs int8 experts where they have AMX (`CPUExpertsInt8._supports_current_device`). There
are two ways to have them elsewhere:

- ``vllm``: that class, whatever the CPU. Its operators need AVX-512 with VNNI and bf16 products.
- ``torch``: a class of the laboratory in its place, for any CPU, which stores its weights in another layout too.

`used(kind)` is for one engine in this process. `install`, an entry point of the laboratory's plugin, reads $KIND
in every process of an engine, for oracles and for several ranks."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from vllm_lab import environment

KIND = "FLASHPATCH_LAB_INT8_EXPERTS"
PLUGIN = "lab_int8_experts"


def kinds() -> list[str]:
    """The kinds that run on this CPU."""
    return ["vllm", "torch"] if environment.packed_ops() and environment.vnni() else ["torch"]


def env(kind: str) -> dict[str, str | None]:
    """The environment of an engine's processes with these kernels; the plugin must be on their path."""
    return {KIND: kind, "VLLM_PLUGINS": f"lab_fp8_standin,lab_cpu,{PLUGIN}"}


def install() -> None:
    """Use the kernels that $KIND names, in this process for good."""
    if kind := os.environ.get(KIND):
        _use(kind)


@contextlib.contextmanager
def used(kind: str) -> Iterator[None]:
    """Within, engines that open get these kernels."""
    undo = _use(kind)
    try:
        yield
    finally:
        undo()


def _use(kind: str) -> Callable[[], None]:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8
    from vllm.model_executor.layers.fused_moe.oracle import int8

    if kind == "vllm":
        own = vars(CPUExpertsInt8)["_supports_current_device"]
        CPUExpertsInt8._supports_current_device = staticmethod(lambda: True)
        return lambda: setattr(CPUExpertsInt8, "_supports_current_device", own)
    original, experts = int8.backend_to_kernel_cls, _torch_experts(CPUExpertsInt8)
    cpu = int8.Int8MoeBackend.CPU
    int8.backend_to_kernel_cls = lambda backend: [experts] if backend is cpu else original(backend)
    return lambda: setattr(int8, "backend_to_kernel_cls", original)


def _torch_experts(base: type) -> type:
    import torch
    from vllm.model_executor.utils import replace_parameter

    class TorchExpertsInt8(base):
        """Experts with int8 weights and activations that are rounded per token, one after the other."""

        @staticmethod
        def _supports_current_device() -> bool:
            return True

        @staticmethod
        def _supports_routing_method(*_: Any) -> bool:
            return True

        def process_weights_after_loading(self, layer: Any) -> None:
            for key in ("w13_weight", "w2_weight"):
                replace_parameter(layer, key, getattr(layer, key).transpose(1, 2).contiguous())

        def apply(
            self,
            output: Any,
            hidden_states: Any,
            w1: Any,
            w2: Any,
            topk_weights: Any,
            topk_ids: Any,
            *_: Any,
            **__: Any,
        ) -> None:
            summed = torch.zeros_like(output, dtype=torch.float32)
            for expert in range(len(w1)):
                tokens, place = (topk_ids == expert).nonzero(as_tuple=True)
                if len(tokens):
                    gate, up = _linear(hidden_states[tokens], w1[expert], self.w1_scale[expert]).chunk(2, 1)
                    out = _linear(torch.nn.functional.silu(gate) * up, w2[expert], self.w2_scale[expert])
                    summed.index_add_(0, tokens, out * topk_weights[tokens, place, None].float())
            output.copy_(summed)

    def _linear(x: Any, w: Any, scale: Any) -> Any:
        """Exact sums of int8 products; x [tokens, in], w int8 [in, out], scale [out, 1]; float32."""
        x = x.float()
        unit = x.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return ((x / unit).round().double() @ w.double()).float() * unit * scale.reshape(1, -1)

    return TorchExpertsInt8
