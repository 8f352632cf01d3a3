"""Step times of a decode step from a roofline of a GPU: the larger of memory time and arithmetic time."""

from __future__ import annotations

from dataclasses import dataclass

from .rollout import StepCost


@dataclass(frozen=True)
class Gpu:
    """Hold a GPU's figures, without sparsity.

    Attributes:
        bandwidth: bytes per second.
        flops: operations per second by bits of a weight.
        source: where the figures are from.
    """

    name: str
    bandwidth: float
    flops: dict[int, float]
    source: str


_HOPPER = {16: 989e12, 8: 1979e12}
GPUS = {
    "H100": Gpu(
        "H100 SXM", 3.35e12, _HOPPER, "NVIDIA H100 data sheet, SXM, halved where it says with sparsity"
    ),
    "H200": Gpu(
        "H200 SXM", 4.8e12, _HOPPER, "NVIDIA H200 data sheet, SXM, halved where it says with sparsity"
    ),
}


@dataclass(frozen=True)
class Model:
    """Hold the sizes of a decoder, as its configuration says."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        """Weights of one decoder layer, norms and biases left out."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.inner

    @property
    def head_weights(self) -> int:
        """Weights of the language model's head."""
        return self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache per token, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head


MODELS = {
    "Qwen2.5-7B": Model("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152064),
    "Llama-3.1-8B": Model("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256),
}


@dataclass(frozen=True)
class Roofline:
    """Estimate step times of a model on a GPU.

    Attributes:
        bits: of the decoder layers' weights; the head, the cache and the drafter stay in bf16.
        memory, arithmetic: shares of the GPU's figures that kernels reach.
        step_seconds, pass_seconds: time of a step, and of a drafter's pass, that no weight explains: launches,
            sampling, scheduling.
    """

    gpu: Gpu
    model: Model
    bits: int = 16
    memory: float = 0.8
    arithmetic: float = 0.6
    step_seconds: float = 1.5e-3
    pass_seconds: float = 1e-4

    def prompt(self, tokens: int) -> float:
        """Return the seconds of a prompt, which is bound by arithmetic."""
        layers = 2 * self.model.layers * self.model.layer_weights * tokens
        return layers / (self.arithmetic * self.gpu.flops[self.bits])

    def step(self, batch: float, cost: StepCost, context: float) -> float:
        """Return the seconds of a step over ``batch`` requests of ``context`` tokens each."""
        model = self.model
        rows = batch * (1 + cost.verified)
        weights = model.layers * model.layer_weights
        seconds = self._bound(weights, rows, self.bits, batch * context * model.kv_bytes, context)
        seconds += self._bound(model.head_weights, rows, 16) + self.step_seconds
        drafter = model.layer_weights + 2 * model.hidden * model.hidden + model.head_weights
        cache = batch * context * model.kv_bytes / model.layers
        return seconds + cost.passes * (self._bound(drafter, batch, 16, cache) + self.pass_seconds)

    def _bound(
        self, weights: float, rows: float, bits: int, cache: float = 0.0, context: float = 0.0
    ) -> float:
        """Return the larger of the times of memory and of arithmetic; ``context`` adds the target's attention."""
        memory = (weights * bits / 8 + cache) / (self.memory * self.gpu.bandwidth)
        arithmetic = 2 * weights * rows / (self.arithmetic * self.gpu.flops[bits])
        width = self.model.layers * self.model.heads * self.model.head
        attention = 4 * rows * context * width / (self.arithmetic * self.gpu.flops[16])
        return max(memory, arithmetic + attention)
