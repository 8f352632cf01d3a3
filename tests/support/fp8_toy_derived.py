"""Toy attention layers that derive values from other layers' weights, as vLLM's MLA and GPT-OSS do.

`Absorbed` multiplies its neighbour's processed weight out, as MLA makes ``W_UK`` of ``kv_b_proj``. `Sinks` converts a
parameter of another module, which an object below it has kept since its construction."""

import fp8_toys as toys
import torch
from torch import nn


class Absorbed(toys.Attention):
    """Keeps ``qkv`` of an identity matrix; the neighbour is registered below it, too."""

    def __init__(self, source: toys.Linear) -> None:
        super().__init__(source)
        self.kv_b_proj = source

    def process(self) -> None:
        super().process()
        self.absorbed = self.kv_b_proj(torch.eye(toys.HIDDEN))[:, : toys.HIDDEN].contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.absorbed


class Backend:
    """Holds another module's parameter and a converted copy of it."""

    def __init__(self, sinks: nn.Parameter) -> None:
        self.source = sinks
        self.sinks = sinks

    def process(self) -> None:
        self.sinks = self.source.detach().double()


class Sinks(toys.Attention):
    """Adds a vector that the block owns."""

    def __init__(self, source: toys.Linear, sinks: nn.Parameter) -> None:
        super().__init__(source)
        self.impl = Backend(sinks)

    def process(self) -> None:
        super().process()
        self.impl.process()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.impl.sinks.float()


class Model(toys.Model):
    """A `fp8_toys.Model` whose attention is ``absorbed`` or ``sinks``."""

    def __init__(self, method: str, blocks: int, kind: str) -> None:
        super().__init__(method, blocks)
        for block in self.layers:
            if kind == "absorbed":
                block.attn = Absorbed(block.qkv)
            else:
                block.sinks = nn.Parameter(torch.zeros(toys.HIDDEN), requires_grad=False)
                block.attn = Sinks(block.qkv, block.sinks)


def checkpoint(seed: int, blocks: int, kind: str, scales: bool = False) -> dict[str, torch.Tensor]:
    """Named tensors of a random policy for such a model."""
    found = dict(toys.checkpoint(seed, blocks, scales=scales))
    random = torch.Generator().manual_seed(1000 + seed)
    if kind == "sinks":
        found.update({f"layers.{i}.sinks": torch.randn(toys.HIDDEN, generator=random) for i in range(blocks)})
    return found
