"""More models than `models.FAMILIES` has, for what needs no engine of each: those that differ from Llama in one thing or another."""

from collections.abc import Mapping
from typing import Any

_ROUTED = dict(num_experts_per_tok=2, moe_intermediate_size=128)
EXPERTS = dict(num_experts=4, **_ROUTED)
GROUPED = dict(n_routed_experts=4, **_ROUTED)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
"""Experts of a layer, as configurations of different models call them."""


def of(model_type: str, **own: Any) -> tuple[str, Mapping[str, Any]]:
    """A family: transformers' model_type, and what its config has beyond the common part."""
    return model_type, own


MORE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama3.1": of(
        "llama",
        max_position_embeddings=16384,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),  # slow turns are slower, for long texts
    "falcon": of("falcon", num_kv_heads=2, new_decoder_architecture=True, alibi=False, bias=False),
    "mistral": of("mistral", head_dim=64, sliding_window=None),
    "olmo": of("olmo", num_key_value_heads=4),  # norms without weights
    "olmo2": of("olmo2"),  # norms behind attention and mlp, and over all heads of q and k at once
    "olmo3": of("olmo3", sliding_window=64),
    "granite": of(
        "granite",
        embedding_multiplier=1.5,
        residual_multiplier=0.8,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "glm4": of("glm4", head_dim=64),  # four norms a layer, pairs of features turned side by side
    "starcoder2": of("starcoder2"),  # norms with means and biases, no gate
    "stablelm": of("stablelm"),  # a quarter of each head is turned
    "persimmon": of("persimmon", num_key_value_heads=4),  # q, k, v head by head, squared ReLU
    "apertus": of("apertus"),  # xIELU
    "smollm3": of("smollm3"),
    "gemma": of("gemma", head_dim=64, tie_word_embeddings=True),
    "cohere": of("cohere", tie_word_embeddings=True),  # attention and mlp side by side
    "cohere2": of("cohere2", head_dim=64, tie_word_embeddings=True, sliding_window=64),
    "gemma4": of(
        "gemma4_text",
        head_dim=64,
        global_head_dim=64,
        tie_word_embeddings=True,
        sliding_window=64,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"],
    ),  # a scalar of each layer is a buffer
    # The router's correction bias is a buffer.
    "dots1": of("dots1", n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, **GROUPED),
    "gpt2": of("gpt2", num_key_value_heads=4, tie_word_embeddings=True),  # learned positions
    "phi": of("phi", num_key_value_heads=4),  # a bias of the head
    "ernie4": of("ernie4_5", head_dim=64),
    "ernie4-moe": of(
        "ernie4_5_moe",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=128,
        moe_num_shared_experts=1,
        moe_layer_start_index=0,
    ),
    "granite-moe": of("granitemoe", intermediate_size=128, **LOCAL),
    # A gate of its shared expert.
    "qwen2-moe": of("qwen2_moe", shared_expert_intermediate_size=128, decoder_sparse_step=1, **EXPERTS),
}
