"""Say which channels can exchange a scale: a table of names by model type, as llm-compressor's SmoothQuant has one.

A norm or linear layer gives up a scale of its output channels to all linear layers that it feeds. Left alone are a norm
that feeds a router or the residual too, experts, and a part of a fused layer (Phi-3's gate and up in one)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashpatch.patches.fp8.calibration.errors import refuse


@dataclass(frozen=True)
class Exchange:
    """Name the channels of one producer and of the linear layers that consume them.

    Attributes:
        producer: module name.
        offset: a norm multiplies by ``offset + weight`` (0 for Llama's, 1 for Gemma's); None for a linear layer.
        consumers: names of linear layers.
        index: for consumers that are not fed one to one, the producer channel of each input channel."""

    producer: str
    offset: float | None
    consumers: tuple[str, ...]
    index: dict[str, tuple[int, ...]] = field(default_factory=dict)


_VALUE, _OUT = "self_attn.v_proj", "self_attn.o_proj"


def _known(offset: float, before_mlp: str) -> tuple[Exchange, ...]:
    """Return the exchanges of a block; a consumer that is a producer too comes first as producer."""
    return (
        Exchange(_VALUE, None, (_OUT,)),
        Exchange("mlp.up_proj", None, ("mlp.down_proj",)),
        Exchange("input_layernorm", offset, ("self_attn.q_proj", "self_attn.k_proj", _VALUE)),
        Exchange(before_mlp, offset, ("mlp.gate_proj", "mlp.up_proj")),
        Exchange("input_layernorm", offset, ("self_attn.qkv_proj",)),
        Exchange(before_mlp, offset, ("mlp.gate_up_proj",)),
    )


TABLE: Mapping[str, tuple[Exchange, ...]] = {
    **dict.fromkeys(
        (*"granite hunyuan_v1_dense llama ministral mistral mixtral phi3 qwen2 qwen2_moe".split(),)
        + ("qwen3", "qwen3_moe", "seed_oss", "smollm3"),
        _known(0.0, "post_attention_layernorm"),
    ),
    "gemma": _known(1.0, "post_attention_layernorm"),
    **dict.fromkeys(("gemma2", "gemma3_text"), _known(1.0, "pre_feedforward_layernorm")),
}


def exchanges(
    config: Mapping[str, Any], block: str, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Exchange]:
    """Yield the exchanges of one block, such as ``model.layers.0``, with absolute names; those of which the block lacks
    a layer are left out. Raises PatchError if the sizes of two layers do not fit together."""

    def has(name: str, dimensions: int) -> bool:
        return len(shapes.get(f"{block}.{name}.weight", ())) == dimensions

    for known in TABLE.get(str(config.get("model_type")), ()):
        if has(known.producer, 2 if known.offset is None else 1) and all(has(c, 2) for c in known.consumers):
            producer, consumers = f"{block}.{known.producer}", tuple(f"{block}.{c}" for c in known.consumers)
            width = shapes[f"{producer}.weight"][0]
            fed = {consumer: shapes[f"{consumer}.weight"][1] for consumer in consumers}
            index = {}
            if known.producer == _VALUE and fed[consumers[0]] != width:
                index[consumers[0]] = _shared_heads(config, producer, width, fed[consumers[0]])
            elif set(fed.values()) != {width}:
                raise refuse(producer, f"feeds {width} channels to layers of {sorted(set(fed.values()))}")
            yield Exchange(producer, known.offset, consumers, index)


def _shared_heads(config: Mapping[str, Any], producer: str, width: int, fed: int) -> tuple[int, ...]:
    """Return, for each input channel of an attention's output layer, the channel of its key-value head."""
    heads = config.get("num_attention_heads")
    if (
        type(heads) is not int
        or heads < 1
        or not width
        or fed % heads
        or fed % width
        or width % (fed // heads)
    ):
        raise refuse(
            producer,
            f"has {width} channels, and {heads} heads in config.json read {fed}",
            "Check that config.json belongs to the weights.",
        )
    size, sharing = fed // heads, fed // width
    return tuple(head // sharing * size + channel for head in range(heads) for channel in range(size))
