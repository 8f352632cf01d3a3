"""Which module a sync of the same weights changed first."""

import pytest
import torch

from flashpatch.verify.exact.calls import Call
from flashpatch.verify.exact.certificate import Certificate, because
from flashpatch.verify.exact.command import tables
from flashpatch.verify.exact.engine import first_change, joined
from flashpatch.verify.exact.rows import changed as changed_rows

NAMES = (
    *("model", "model.layers.0", "model.layers.0.norm"),
    *("model.layers.1", "model.layers.1.down_proj", "lm_head"),
)


def calls(*changed: str) -> list[Call]:
    """One pass, modules in the order in which they begin."""
    return [Call(name, torch.zeros(2), torch.full((2,), float(name in changed))) for name in NAMES]


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ((), ""),
        (("model", "model.layers.1", "model.layers.1.down_proj", "lm_head"), "model.layers.1.down_proj"),
        (("model", "model.layers.0", "model.layers.1", "model.layers.1.down_proj"), "model.layers.0"),
        (("lm_head",), "lm_head"),
    ],
)
def test_the_innermost_module_is_named(changed, first):
    assert first_change(calls(), calls(*changed)) == first


def test_another_pass_is_no_equal_one():
    assert first_change(calls(), calls()[:-1]) == "the order of modules"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no  room"), "no room"),
        (KeyError("w2"), "KeyError: 'w2' at "),
        (AssertionError(), "AssertionError at "),
    ],
)
def test_an_error_without_words_is_placed(error, said):
    try:
        raise error
    except Exception as raised:
        found = because(raised)
    assert found.startswith(f"cannot compare here: {said}")
    assert ("exact/test_drift.py:" in found) == said.endswith("at ")


def test_a_row_that_no_token_reads_is_compared_after_a_sync() -> None:
    rows = torch.zeros(4, 2)
    before = {"embed": rows, "positions": rows}
    assert changed_rows(before, {"embed": rows.clone(), "positions": rows.clone()}) == ""
    assert changed_rows(before, before | {"positions": rows + 1}) == "positions, rows that no token reads"


def test_a_sync_that_changed_something_is_shown_and_fails():
    assert Certificate([], syncs=("", "")).ok
    drifted = Certificate([], syncs=("", "lm_head"))
    assert not drifted.ok and drifted.as_json()["syncs"] == ("", "lm_head")
    *_, shown = tables(drifted)
    assert shown.rows == [("1", "nothing"), ("2", "lm_head")]


def test_a_prefill_in_two_steps_is_one() -> None:
    def step(tokens: int, first: int, heads: list[int]) -> list[Call]:
        rows = torch.arange(first, first + tokens, dtype=torch.float32)[:, None]
        modules = [Call("model", rows[:, 0].long(), rows), Call("model.norm", rows, rows + 1)]
        return modules + [
            Call("logits_processor", rows[:0], rows[-1:] if n == 1 else rows[:n]) for n in heads
        ]

    whole, logits = joined([*step(6, 0, [1, 6]), *step(4, 6, [1, 3])])
    once, wanted = joined(step(10, 0, [1, 9]))
    assert torch.equal(logits, wanted) and len(logits) == 9
    assert [call.name for call in whole] == [call.name for call in once]
    for one, other in zip(whole, once, strict=True):
        assert torch.equal(one.given, other.given) and torch.equal(one.returned, other.returned)
    assert not len(joined([*step(6, 0, [1, 6]), *step(4, 6, [1, 3])[1:]])[1]) == 9  # another order of modules


def test_of_a_compiled_engine_the_logits_are_had_alone() -> None:
    heads = [torch.empty(0), torch.zeros(1, 4), torch.arange(36.0).reshape(9, 4), torch.zeros(3)]
    calls, logits = joined([Call("logits_processor", torch.empty(0), head) for head in heads])
    assert torch.equal(logits, heads[2]) and [call.name for call in calls] == ["logits_processor"]
