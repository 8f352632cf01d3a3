"""The lower bound: every tensor copied once, every linear weight brought into its kernel's form once.

The functions that do the latter are vLLM's own: the per-channel fp8 quantization, and the packing of a bf16
weight for the CPU's matrix multiplication. No engine, no checks, no bookkeeping; one fused weight is gathered
at a time, in memory that is used again for the next. Weights of experts are stacked and no more.
"""

from __future__ import annotations

import torch
from random_models import Size

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class Bound:
    """Weights of a model as its kernels want them, and nothing around."""

    def __init__(self, size: Size, precision: str) -> None:
        self.quantize = precision != "bf16"
        rows: dict[str, list[str]] = {}  # destination -> checkpoint tensors stacked in it
        self.shape: dict[str, tuple[int, ...]] = {}
        for name, shape in size.shapes():
            target = _target(name)
            rows.setdefault(target, []).append(name)
            self.shape[target] = (self.shape.get(target, (0,))[0] + shape[0], *shape[1:])
        self.rows = rows
        self.linear = {target for target in rows if target.endswith("_proj.weight")}
        self.live: dict[str, torch.Tensor] = {}
        self.scale: dict[str, torch.Tensor] = {}
        self.kernel: dict[str, torch.nn.Module] = {}
        for target, shape in self.shape.items():
            if target not in self.linear:
                self.live[target] = torch.empty(shape, dtype=torch.bfloat16).fill_(0)
            elif self.quantize:
                self.live[target] = torch.empty(shape, dtype=torch.float8_e4m3fn).view(torch.uint8).fill_(0)
                self.scale[target] = torch.zeros(shape[0], 1)

    def update(self, policy: list[tuple[str, torch.Tensor]]) -> None:
        """Take over ``policy``."""
        tensors = dict(policy)
        scratch = torch.empty(max(_count(self.shape[target]) for target in self.linear), dtype=torch.bfloat16)
        for target, names in self.rows.items():
            linear = target in self.linear
            shape = self.shape[target]
            home = scratch[: _count(shape)].view(shape) if linear else self.live[target]
            row = 0
            for name in names:
                home[row : row + len(tensors[name])].copy_(tensors[name])
                row += len(tensors[name])
            if linear and self.quantize:
                self._quantize(target, home)
            elif linear or target == "lm_head.weight":
                self._pack(target, home)

    def _quantize(self, target: str, weight: torch.Tensor) -> None:
        from vllm.model_executor.layers.quantization.online import fp8
        from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax

        scale = fp8._fp8_channel_scale(weight_amax(weight, dim=-1, keepdim=True))
        self.live[target].copy_(fp8._fp8_quant_per_channel(weight, scale).view(torch.uint8))
        self.scale[target].copy_(scale)

    def _pack(self, target: str, weight: torch.Tensor) -> None:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        holder = torch.nn.Module()
        holder.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(holder, remove_weight=True)
        self.kernel[target] = holder


def _target(name: str) -> str:
    before, expert, rest = name.partition(".mlp.experts.")
    if expert:  # stacked, not packed
        return f"{before}{expert}{'w2' if 'down_proj' in rest else 'w13'}"
    module, _, key = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_FUSED.get(last, last)}.{key}" if parent else name


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
