"""Define the drafter: one decoder layer behind a linear map of the target's state and the next token's embedding.

EAGLE-1 (Li et al., arXiv 2401.15077): ``fc`` over [embedding, state] of width 2H, then a decoder layer
without its input norm. EAGLE-3 (arXiv 2503.01840): ``fc`` over k of the target's layers, then a layer that
attends over [normed embedding, normed state], and as published a head of its own, over a vocabulary of its own. Parameters carry the names that vLLM's ``llama_eagle.py`` and
``llama_eagle3.py`` and SGLang's files of the same names read."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings
from flashpatch.patches.eagle.train.unroll import UnrolledAttention


class Drafter(nn.Module):
    """Predict, as EAGLE-1, the target's next state from its present one and the token in between.

    Args:
        config: of `drafter_config.drafter_config`."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config
        qwen = config.model_type == "qwen2"
        layer = (Qwen2DecoderLayer if qwen else LlamaDecoderLayer)(config, 0)
        layer.input_layernorm = nn.Identity()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([layer])
        self.rotary = (Qwen2RotaryEmbedding if qwen else LlamaRotaryEmbedding)(config)

    def forward(
        self, states: Tensor, embedded: Tensor, positions: Tensor, mask: Tensor, steps: int = 1
    ) -> Tensor:
        """Predict what the target's head reads: the target's next states, or, as EAGLE-3, states of the drafter's own.

        Args:
            states: [1, T, width], what it reads of the target where each token was the input.
            embedded: [1, T, H], embedding of the token after it.
            positions: int64 [1, T].
            mask: bool [1, 1, T, T], True where a row may attend.
            steps: draft steps; from the second on each row reads what it put out before (before EAGLE-3's last norm, as
                engines do), and the embedding one row on, see `unroll`.

        Returns:
            [steps, T, H]: at step j the state j + 1 positions on. The last j rows of step j mean nothing, nor do those
            of a window."""
        layer, states, found = self.layer(), self.begin(states), []
        unrolled: UnrolledAttention | None = None
        for step in range(steps):
            rotary = self.rotary(embedded, positions + step)
            states, inputs = self.inputs(states, embedded.roll(-step, 1))
            if unrolled is not None:
                attended = unrolled.attend(inputs, rotary)
            else:
                attended, _ = layer.self_attn(inputs, position_embeddings=rotary, attention_mask=mask)
                unrolled = UnrolledAttention(layer.self_attn, inputs, rotary, mask) if steps > 1 else None
            states = states + attended
            states = states + layer.mlp(layer.post_attention_layernorm(states))
            found.append(self.end(states))
        return torch.cat(found)

    def logits(self, states: Tensor, target_embeddings: TargetEmbeddings) -> Tensor:
        """Return logits [..., draft vocabulary] of what `forward` returns."""
        return self.lm_head(states) if self.config.eagle_head == "own" else target_embeddings.logits(states)

    def vocabulary(self) -> Tensor | None:
        """Return the target's ids [draft vocabulary] of the tokens that can be drafted; None if all can."""
        found = getattr(self, "d2t", None)
        return None if found is None else found + torch.arange(len(found), device=found.device)

    def layer(self) -> nn.Module:
        """Return the decoder layer."""
        return self.layers[0]

    def begin(self, states: Tensor) -> Tensor:
        """Return what the first step reads of the target's states."""
        return states

    def inputs(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the layer adds its attention's output to, and what its attention reads."""
        both = self.fc(torch.cat((embedded, states), dim=-1))
        return both, both

    def end(self, states: Tensor) -> Tensor:
        """Return what the target's head reads."""
        return states


class Drafter3(Drafter):
    """Predict, as EAGLE-3, from ``num_aux_hidden_states`` layers of the target side by side.

    Attributes:
        d2t: int64 [draft vocabulary], what a draft token's number lacks to the target's, if its vocabulary is smaller."""

    def __init__(self, config: PretrainedConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.num_aux_hidden_states * size, size, bias=False)
        self.midlayer = LlamaDecoderLayer(config, 0)
        self.midlayer.hidden_norm = LlamaRMSNorm(size, eps=eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.midlayer.self_attn, name)
            wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.midlayer.self_attn, name, wide)
        self.norm = LlamaRMSNorm(size, eps=eps)
        if config.eagle_head == "own":
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary = LlamaRotaryEmbedding(config)

    def layer(self) -> nn.Module:
        return self.midlayer

    def begin(self, states: Tensor) -> Tensor:
        return self.fc(states)

    def inputs(self, states: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        return states, torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(states)), dim=-1)

    def end(self, states: Tensor) -> Tensor:
        return self.norm(states)


def make_drafter(config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Drafter:
    """Make a drafter from scratch, its matrices drawn with the target's ``initializer_range``.

    An EAGLE-1 drafter starts near the map that keeps the state."""
    generator = torch.Generator().manual_seed(seed)
    drafter = (Drafter3 if config.eagle_kind == "eagle3" else Drafter)(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
        if config.eagle_kind == "eagle":
            size = config.hidden_size
            drafter.fc.weight[:, size:] += torch.eye(size)
    return drafter.to(dtype)
