"""Which module a sync of the same weights changed first."""

from dataclasses import replace

import pytest
import torch

from flashpatch.verify.exact.calls import Call
from flashpatch.verify.exact.certificate import Certificate, because
from flashpatch.verify.exact.command import tables
from flashpatch.verify.exact.engine import first_change, sorted_out
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


def test_a_sequence_has_its_rows_of_all_steps() -> None:
    """Of one that is read in two steps, the second beside the others; of one that is answered; and of one that was read before."""
    sequences = [[5, 6, 7, 8], [5, 6, 9, 6], [4, 4, 4]]

    def step(places: list[tuple[int, int]], heads: list[list[int]]) -> list[Call]:
        values = torch.tensor([[100.0 * one + at] for one, at in places])
        tokens = torch.tensor([[sequences[one][at] for one, at in places], [at for _, at in places]])
        head = [Call("logits_processor", values[:0], values[rows]) for rows in heads]
        return [
            Call("model", tokens[0], values, tokens=tokens),
            Call("model.norm", values, values + 1),
            *head,
        ]

    read = [
        step([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)], [[1, 4], [0, 1]]),
        step([(0, 2), (0, 3), (1, 3), (2, 0), (2, 1)], [[1, 2, 4], [0]]),
        step([(2, 0), (2, 1)], [[1]]),
        [replace(call, returned=call.returned[0]) for call in step([(2, 2)], [[0]])],
    ]
    found = sorted_out([call for calls in read for call in calls], sequences)
    for one, (calls, logits) in enumerate(found):
        rows = torch.arange(100.0 * one, 100 * one + len(sequences[one]))[:, None]
        assert [call.name for call in calls] == ["model", "model.norm", "logits_processor"]
        assert torch.equal(calls[0].returned, rows) and torch.equal(calls[1].given, rows)
        first = (0, 2, 1)[one]  # the logits of the first prompt alone are asked for
        assert torch.equal(logits, rows[first:-1])
    assert sorted_out(read[0], sequences)[0][0] == []  # its last two were not read


def test_of_a_compiled_engine_the_logits_are_had_alone() -> None:
    heads = [torch.empty(0), torch.zeros(1, 4), torch.arange(36.0).reshape(9, 4), torch.zeros(3)]
    ((calls, logits),) = sorted_out([Call("logits_processor", torch.empty(0), head) for head in heads], [[0]])
    assert torch.equal(logits, heads[2]) and [call.name for call in calls] == ["logits_processor"]
