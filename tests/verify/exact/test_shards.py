"""What ranks of tensor parallelism saw, joined into what one process would have seen."""

import pytest
import torch

from flashpatch.verify.exact.calls import Call
from flashpatch.verify.exact.certificate import Place
from flashpatch.verify.exact.command import tables
from flashpatch.verify.exact.compare import Certificate, _ordered
from flashpatch.verify.exact.engine import first_changed
from flashpatch.verify.exact.shards import HEAD, SAME, SUM, UNKNOWN, Layout, join, layouts_of

TOKENS = 5
X = torch.arange(TOKENS * 8, dtype=torch.float32).reshape(TOKENS, 8)
COLUMNS = Layout("split", ((0, 1),))
EITHER = Layout("either", ((0, 1),))


def one(name: str, given: list, returned: list, layouts=None):
    """Join the calls of one module, whose tensors the ranks have in this order."""
    ranks = [[Call(name, *tensors)] for tensors in zip(given, returned, strict=True)]
    found = join(ranks, {name: layouts} if layouts else {})
    return found.calls[0] if found.calls else None, found.apart, found.left


def test_queries_keys_and_values_are_joined_part_by_part() -> None:
    """Four ranks, two heads of keys: neighbours have the same."""
    q, k, v = X, X[:, :4] + 100, X[:, 4:] + 200
    ranks = [
        torch.cat((q[:, 2 * at : 2 * at + 2], *(kv[:, at // 2 * 2 : at // 2 * 2 + 2] for kv in (k, v))), 1)
        for at in range(4)
    ]
    layouts = SAME, Layout("split", ((2, 1), (2, 2), (2, 2)))
    call, apart, left = one("qkv_proj", [X] * 4, ranks, layouts)
    assert torch.equal(call.returned, torch.cat((q, k, v), 1)) and torch.equal(call.given, X)
    assert call.returned_by.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, *[-1] * 8] and call.given_by is None
    assert not apart and not left
    ranks[3][:, 2] += 1
    _, (found,), _ = one("qkv_proj", [X] * 4, ranks, layouts)
    assert (found.name, found.rank) == ("qkv_proj", "rank 3 against rank 2")


@pytest.mark.parametrize("out", [SAME, SUM])
def test_rows(out: Layout) -> None:
    returned = [X, X] if out == SAME else [X / 4, 3 * X / 4]
    call, apart, _ = one("down_proj", [X[:, :6], X[:, 6:]], returned, (COLUMNS, out))
    assert torch.equal(call.given, X) and torch.equal(call.returned, X) and not apart
    assert call.given_by.tolist() == [0] * 6 + [1] * 2


def test_heads_that_several_ranks_have_count_once() -> None:
    heads = X.reshape(TOKENS, 2, 4)
    layout = Layout("heads", ((0, 2),))
    parts = [heads[:, :1]] * 2 + [heads[:, 1:]] * 2
    call, _, _ = one("k_norm", parts, parts, (layout,) * 2)
    assert torch.equal(call.given, heads) and torch.equal(call.returned, heads)
    call, _, _ = one("input_layernorm", [X] * 2, [X] * 2, (layout,) * 2)
    assert torch.equal(call.returned, X)


def test_ranks_that_hold_the_same_must_agree() -> None:
    call, (apart,), _ = one("norm", [X] * 3, [X, X, 2 * X], (SAME, SAME))
    assert (apart.name, apart.rank, apart.gap) == ("norm", "rank 2 against rank 0", pytest.approx(1.0))
    assert torch.equal(call.returned, X)
    _, (apart,), _ = one("norm", [X, X + 9], [X, X], (SAME, SAME))
    assert apart.name == "into norm"
    nothing = torch.full_like(X, float("nan"))
    assert len(one("norm", [X, X], [X, nothing], (SAME, SAME))[1]) == 1


def test_what_no_class_explains_is_left_out_unless_it_is_the_same() -> None:
    assert torch.equal(one("mlp", [X, X], [X, X])[0].returned, X)
    call, apart, left = one("shared_experts", [X, X], [X, 2 * X])
    assert call is None and not apart and left == ["shared_experts"]
    halves = [X[:, :4], X[:, 4:]]
    for tensors in (halves, [X, X]):  # a norm that looks itself whether it is given a part
        assert torch.equal(one("q_norm", tensors, tensors, (EITHER, EITHER))[0].returned, X)
    rows = [X.reshape(-1, 4), X.reshape(-1, 4) + 1]  # a row per head
    ranks = [[Call("model", X[:, 0].long(), X), Call("q_norm", heads, heads)] for heads in rows]
    assert join(ranks, {"q_norm": (Layout("heads", ((0, 1),)),) * 2}).left == ["q_norm"]
    assert one("scan", [X[:, :4], X[:, 4:]], [X[:, :4], X[:, 4:]], (UNKNOWN, COLUMNS))[2] == ["scan"]


def test_the_heads_columns_are_known_by_the_vocabulary() -> None:
    call, _, _ = one(HEAD, [torch.empty(0)] * 2, [X, torch.empty(0)], (UNKNOWN, Layout("split", ((5, 1),))))
    assert call.returned_by.tolist() == [0] * 5 + [1] * 3


def module(kind: str = "Module", *children: tuple[str, torch.nn.Module], **attributes) -> torch.nn.Module:
    made = type(kind, (torch.nn.Module,), {})()
    vars(made).update(attributes)
    for name, child in children:
        made.add_module(name, child)
    return made


def test_a_modules_class_says_how_it_is_split() -> None:
    linear = dict(output_partition_sizes=[8], tp_size=4)
    qkv = dict(gather_output=False, output_partition_sizes=[8, 2, 2], num_kv_head_replicas=2)
    row = dict(input_is_parallel=True, reduce_results=True)
    adapted = module("Adapter", base_layer=module(**{**linear, **qkv}))
    norms = [(f"{of}_norm", module("RMSNorm")) for of in "qk"]
    mixed = (
        ("in_proj", module(**linear, gather_output=False)),
        ("norm", module("MixerRMSNormGated", tp_size=4)),
    )
    parts = {
        "embed_tokens": module(tp_size=4, shard_indices=0, num_embeddings_per_partition=64),
        "attn": module("Attention", ("qkv_proj", adapted), *norms),
        "o_proj": module(**linear, **row),
        "shared_down_proj": module(**linear, **{**row, "reduce_results": False}),
        "gate": module(output_partition_sizes=[8]),
        "attn_quantized": module(quant_method=None),
        "mixer": module("Mixer", *mixed, groups_ssm_state_size=1),
    }
    found = layouts_of(module("Model", *parts.items()))
    assert found == {
        "embed_tokens": (SAME, SAME),
        "attn.qkv_proj": (SAME, Layout("split", ((8, 1), (2, 2), (2, 2)))),
        "attn.q_norm": (Layout("heads", ((0, 1),)),) * 2,
        "attn.k_norm": (Layout("heads", ((0, 2),)),) * 2,
        "o_proj": (COLUMNS, SAME),
        "shared_down_proj": (COLUMNS, SUM),
        "gate": (SAME, SAME),
        "mixer.in_proj": (SAME, UNKNOWN),
        "mixer.norm": (EITHER, EITHER),
        HEAD: (UNKNOWN, Layout("split", ((64, 1),))),
    }


def test_a_place_is_shown_with_its_rank_where_it_is() -> None:
    calls = [Call(name, X, X) for name in ("norm", "qkv_proj")]
    disagree = Place("qkv_proj", 0.5, 0.1, "rank 1 against rank 0")
    one = Place("qkv_proj", 0.5, 0.1, "rank 1")
    found = Certificate(_ordered([disagree, Place("into norm", 0, 1), one, Place("logits", 0, 1)], calls))
    assert [str(place) for place in found.places] == [
        *("into norm", "qkv_proj, rank 1 against rank 0", "qkv_proj, rank 1", "logits")
    ]
    assert found.first is disagree and "qkv_proj, rank 1 against rank 0" in tables(found)[0].title


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({0: ["o_proj"], 1: ["qkv_proj", "o_proj"]}, "qkv_proj, rank 1"),
        ({0: ["o_proj"], 1: ["o_proj"]}, "o_proj"),
        ({0: [HEAD], 1: []}, HEAD),
        ({0: [], 1: []}, ""),
    ],
)
def test_a_sync_that_changed_one_rank_is_named_by_it(changed: dict, named: str) -> None:
    def calls(*names: str) -> list[Call]:
        return [Call(name, X, X + (name in names)) for name in ("qkv_proj", "o_proj", HEAD)]

    assert first_changed([calls(), calls()], [calls(*changed[rank]) for rank in (0, 1)]) == named
