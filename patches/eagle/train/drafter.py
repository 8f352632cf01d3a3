"""Define the drafter: one decoder layer behind a linear map of the target's state and the next token's
embedding.

EAGLE-1 (Li et al., arXiv 2401.15077): ``fc`` over [embedding, state] of width 2H, then a decoder layer
without its input norm. EAGLE-3 (arXiv 2503.01840): ``fc`` over k of the target's layers, then a layer that
attends over [normed embedding, normed state]. Parameters carry the names that vLLM's ``llama_eagle.py`` and
``llama_eagle3.py`` and SGLang's files of the same names read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from flashpatch.patches.eagle.train.unroll import Rotary, UnrolledAttention


class Drafter(nn.Module):
    """Predict, as EAGLE-1, the target's next state from its present one and the token in between.

    Args:
        config: of `drafter_config.drafter_config`.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        qwen = config.model_type == "qwen2"
        layer = (Qwen2DecoderLayer if qwen else LlamaDecoderLayer)(config, 0)
        layer.input_layernorm = nn.Identity()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([layer])
        self.rotary = (Qwen2RotaryEmbedding if qwen else LlamaRotaryEmbedding)(config)

    @property
    def width(self) -> int:
        """Width of the target's states it reads."""
        return self.config.hidden_size

    def forward(
        self, states: Tensor, embedded: Tensor, positions: Tensor, mask: Tensor, steps: int = 1
    ) -> Tensor:
        """Predict the target's next states.

        Args:
            states: [1, T, width], the target's state where each token was the input.
            embedded: [1, T, H], embedding of the token after it.
            positions: int64 [1, T].
            mask: bool [1, 1, T, T], True where a row may attend.
            steps: draft steps; from the second on each row reads what it put out before, and the embedding one row on,
                see `unroll`.

        Returns:
            [steps, T, H], what the target's head reads: at step j the state j + 1 positions on. The last j rows of
            step j mean nothing, nor do those of a window.
        """
        layer, found = self.layers[0], []
        unrolled: UnrolledAttention | None = None
        for embeds, rotary in _steps(self.rotary, embedded, positions, steps):
            inputs = self.fc(torch.cat((embeds, states), dim=-1))
            if unrolled is None:
                states = layer(
                    inputs, attention_mask=mask, position_ids=positions, position_embeddings=rotary
                )
                unrolled = UnrolledAttention(layer.self_attn, inputs, rotary, mask) if steps > 1 else None
            else:
                inputs = inputs + unrolled.attend(inputs, rotary)
                states = inputs + layer.mlp(layer.post_attention_layernorm(inputs))
            found.append(states)
        return torch.cat(found)


class Drafter3(nn.Module):
    """Predict, as EAGLE-3, from ``num_aux_hidden_states`` layers side by side; the interface of `Drafter`."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(self.width, config.hidden_size, bias=False)
        self.midlayer = _Layer3(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def width(self) -> int:
        """Width of the target's states it reads."""
        return self.config.num_aux_hidden_states * self.config.hidden_size

    def forward(
        self, states: Tensor, embedded: Tensor, positions: Tensor, mask: Tensor, steps: int = 1
    ) -> Tensor:
        """Predict as `Drafter.forward` does; the result is normed, as the target's head reads it.

        From the second step on a row reads its own output before that norm, as engines do, in place of ``fc``'s.
        """
        states, found = self.fc(states), []
        unrolled: UnrolledAttention | None = None
        for embeds, rotary in _steps(self.rotary, embedded, positions, steps):
            both = self.midlayer.inputs(embeds, states)
            if unrolled is None:
                attended = self.midlayer.self_attn(both, position_embeddings=rotary, attention_mask=mask)[0]
                if steps > 1:
                    unrolled = UnrolledAttention(self.midlayer.self_attn, both, rotary, mask)
            else:
                attended = unrolled.attend(both, rotary)
            states = self.midlayer.outputs(states, attended)
            found.append(self.norm(states))
        return torch.cat(found)


def _steps(
    rotary: nn.Module, embedded: Tensor, positions: Tensor, steps: int
) -> Iterator[tuple[Tensor, Rotary]]:
    """Yield embeddings and rotary tables of each draft step: all one row on from the step before."""
    for step in range(steps):
        yield embedded.roll(-step, 1), rotary(embedded, positions + step)


class _Layer3(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(
                self.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            )
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)

    def inputs(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return what the attention reads, [1, T, 2H]."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), dim=-1)

    def outputs(self, states: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [1, T, H] from its attention's."""
        states = states + attended
        return states + self.mlp(self.post_attention_layernorm(states))


def make_drafter(
    config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Drafter | Drafter3:
    """Make a drafter from scratch, its matrices drawn with the target's ``initializer_range``.

    An EAGLE-1 drafter starts near the map that keeps the state.
    """
    generator = torch.Generator().manual_seed(seed)
    drafter = (Drafter3 if config.eagle_kind == "eagle3" else Drafter)(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
        if isinstance(drafter, Drafter):
            size = config.hidden_size
            drafter.fc.weight[:, size:] += torch.eye(size)
    return drafter.to(dtype)
