"""Which channels can exchange a scale, found without names: families, shared key-value heads, and what must
not."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import profile_lab
import torch

from flashpatch import PatchError
from flashpatch.patches.fp8.calibration import structure
from flashpatch.patches.fp8.calibration.structure import Exchange

KV = {"self_attn.o_proj": tuple(int(x) for head in (0, 0, 1, 1) for x in range(head * 16, head * 16 + 16))}
V = Exchange("self_attn.v_proj", None, ("self_attn.o_proj",), KV)
UP = Exchange("mlp.up_proj", None, ("mlp.down_proj",))


def norm(name: str, offset: float, *consumers: str) -> Exchange:
    return Exchange(name, offset, consumers)


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")


def found(family: str, directory, **more) -> set[tuple]:
    profile_lab.build(directory, family, **more)
    kinds = structure.of_directory(directory).kinds
    assert len(kinds) == 1
    return {(e.producer, e.offset, e.consumers, tuple(e.index.items())) for e in next(iter(kinds.values()))}


def as_set(*exchanges: Exchange) -> set[tuple]:
    return {(e.producer, e.offset, e.consumers, tuple(e.index.items())) for e in exchanges}


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("qwen2", (V, UP, norm("input_layernorm", 0.0, *QKV), norm("post_attention_layernorm", 0.0, *MLP))),
        ("gemma", (V, UP, norm("input_layernorm", 1.0, *QKV), norm("post_attention_layernorm", 1.0, *MLP))),
        # Gemma 2 and 3 have norms after attention and MLP too, which feed no linear layer, and norms of q and
        # k
        (
            "gemma3_text",
            (V, UP, norm("input_layernorm", 1.0, *QKV), norm("pre_feedforward_layernorm", 1.0, *MLP)),
        ),
        # one fused layer cannot give up the scales of a part of its rows
        (
            "phi3",
            (
                norm("input_layernorm", 0.0, "self_attn.qkv_proj"),
                norm("post_attention_layernorm", 0.0, "mlp.gate_up_proj"),
            ),
        ),
        # the second norm also feeds the router, whose choice must not change
        ("qwen3_moe", (V, norm("input_layernorm", 0.0, *QKV))),
    ],
)
def test_families(family: str, wanted, tmp_path) -> None:
    more = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32) if "moe" in family else {}
    assert found(family, tmp_path / "m", **more) == as_set(*wanted)


class Strange(torch.nn.Module):
    """A block of two linear layers with something between, in a model that transformers does not know."""

    def __init__(self, between, leak: bool = False, norm: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        block = self.block = torch.nn.Module()
        block.norm, block.a, block.b = (
            norm or torch.nn.RMSNorm(8),
            torch.nn.Linear(8, 6),
            torch.nn.Linear(6, 8),
        )

        def forward(x):
            y = block.norm(x)
            return x + block.b(between(block.a(y))) + (y if leak else 0)

        block.forward = forward
        self.layers = torch.nn.ModuleList([block])

    def forward(self, input_ids, use_cache=False):
        return self.layers[0](self.embed(input_ids))


def exchanges(model) -> set[str]:
    torch.manual_seed(0)
    kinds = structure.of_model(model.eval(), 16).kinds
    return {e.producer for found in kinds.values() for e in found}


@pytest.mark.parametrize(
    ("between", "admitted"),
    [
        (lambda y: y, {"norm", "a"}),
        (lambda y: torch.nn.functional.leaky_relu(y), {"norm", "a"}),  # positive scales pass through it
        (lambda y: torch.nn.functional.silu(y), {"norm"}),
        (lambda y: y / y.norm(dim=-1, keepdim=True), {"norm"}),
        (lambda y: y.flip(-1), {"norm", "a"}),
        (lambda y: y * y, {"norm"}),
    ],
    ids=["identity", "leaky", "silu", "normalised", "flipped", "squared"],
)
def test_what_lies_between_decides(between, admitted) -> None:
    assert exchanges(Strange(between)) == admitted


def test_a_norm_that_feeds_the_residual_too_is_left_alone() -> None:
    assert exchanges(Strange(lambda y: y, leak=True)) == {"a"}


def test_a_layer_norm_with_bias() -> None:
    model = Strange(torch.nn.functional.silu, norm=torch.nn.LayerNorm(8))
    torch.nn.init.normal_(model.block.norm.bias)
    assert exchanges(model) == {"norm"}


def test_channels_in_another_order_are_followed() -> None:
    model = Strange(lambda y: y.flip(-1))
    torch.manual_seed(0)
    [kind] = structure.of_model(model.eval(), 16).kinds.values()
    [exchange] = [e for e in kind if e.producer == "a"]
    assert exchange.index == {"b": (5, 4, 3, 2, 1, 0)}


def test_a_config_that_nobody_knows(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "never_heard_of"}')
    with pytest.raises(PatchError, match="cannot be examined"):
        structure.of_directory(tmp_path)
