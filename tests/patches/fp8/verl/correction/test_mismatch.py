"""The monitor: known gaps are measured, jumps are found, and a mixed batch is told apart."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

numpy = pytest.importorskip("numpy")

from hypothesis import example, given
from hypothesis import strategies as st

from flashpatch import ledger
from flashpatch.patches.fp8.mismatch.monitor import Batch, Monitor, measure, observe
from flashpatch.patches.fp8.verl.correction import mismatch
from flashpatch.patches.fp8.verl.transfer import receipts


def test_the_numbers_by_hand() -> None:
    rollout = torch.tensor([[-1.0, -2.0, -9.0]])
    trainer = torch.tensor([[-1.0 + math.log(3), -2.0, 0.0]])
    found = measure(rollout, trainer, torch.tensor([[1, 1, 0]]), cap=2.0)
    wanted = dict(tokens=2, k1=-math.log(3) / 2, k3=(2 - math.log(3)) / 2)
    assert found == pytest.approx(wanted | dict(ratio_mean=2, ratio_std=1, clip_fraction=0.5))
    assert measure(rollout, trainer, torch.zeros(1, 3), 2.0) == {"tokens": 0.0}


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=20))
@example([1.5577789812655183e-10])  # exp(d) - d - 1 is below 0 there
def test_k3_is_never_negative_nor_infinite(gaps: list[float]) -> None:
    d = torch.tensor([gaps])
    found = measure(torch.zeros_like(d), d, torch.ones_like(d), 2.0)
    assert found["k3"] >= 0 and all(map(math.isfinite, found.values()))


def test_a_jump_is_found_and_not_taken_for_the_usual() -> None:
    monitor = Monitor()
    assert [monitor.jump("", k3, 4.0) for k3 in (1e-3, 2e-3, 1.5e-3, 3e-3)] == [None] * 4
    assert monitor.jump("", 0.02, 4.0) == pytest.approx(1.75e-3)
    assert monitor.jump("", 0.02, 4.0) is not None and monitor.jump("", math.nan, 4.0) is not None
    assert monitor.jump("", 2e-3, 4.0) is None
    assert monitor.jump("", 0.02, 0.0) is None  # switched off, it learns that as usual
    assert Monitor().jump("", 9.0, 4.0) is None  # nothing to compare with
    quiet = Monitor()
    # bf16 against itself: float noise
    assert [quiet.jump("", k3, 4.0) for k3 in (0.0, 0.0, 1e-8)] == [None] * 3


def test_the_layers_that_grew_most_come_first() -> None:
    monitor = Monitor()
    monitor.updated({"a": 0.01, "b": 0.01, "c": 0.01, "gone": 1.0})
    assert monitor.grown() == []
    monitor.updated({"a": 0.011, "b": 0.05, "c": 0.009, "new": 1.0})
    monitor.updated({})  # a sync of nothing quantized changes nothing
    assert monitor.grown() == [("b", 0.01, 0.05), ("a", 0.01, 0.011)]


def batch_of(gap: dict[int, float], tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    d = torch.stack([size * torch.randn(tokens, generator=noise) for size in gap.values()])
    rollout = -torch.rand(d.shape, generator=noise) - 1
    return rollout, rollout + d, torch.ones_like(d)


def test_a_mixed_batch_is_told_apart_and_padding_left_out(caplog) -> None:
    monitor = Monitor()
    batch = Batch(2.0, ["bf16", "int8", None, "int8"])
    for size in (0.05, 0.05, 0.05, 0.5):
        tensors = batch_of({0: 0.01, 1: size, 2: 9.0, 3: size})
        monitor.updated({"model.layers.1.mlp.down_proj": 0.01 * (1 + (size > 0.1))})
        found = observe(monitor, *tensors, batch, 4.0)
        assert found["mismatch/tokens"] == 120 and found["mismatch/tokens/int8"] == 80
        assert found["mismatch/k3/bf16"] < 1e-3 < found["mismatch/k3/int8"]
        assert found["mismatch/suspect"] == (size > 0.1)
    [said] = [record.message for record in caplog.records if "suspect" in record.message]
    assert "k3 of int8" in said and "bf16 is" not in said
    assert "model.layers.1.mlp.down_proj 1.00% to 2.00%" in said


def test_what_workers_rounded_comes_with_their_receipts() -> None:
    def sync(*errors: dict[str, float]) -> dict:
        return {"judged": True, "workers": [{"errors": e} for e in errors]}

    given = [[sync({"a": 0.1, "b": 0.3}, {"a": 0.2})], None]
    given += [[{"judged": False}], [{"judged": True, "workers": None}]]
    assert receipts.rounding_errors(given) == {"a": 0.2, "b": 0.3}


def test_verls_metrics_stay_and_ours_join(monkeypatch) -> None:
    monkeypatch.setattr(mismatch.engine, "options", lambda family: {"mismatch_jump": 4.0, "fleet": []})
    monkeypatch.setattr(mismatch, "MONITOR", Monitor())
    rollout, trainer, mask = batch_of({0: 0.1, 1: 0.1, 2: 0.1})
    data = SimpleNamespace(
        batch={
            "rollout_log_probs": rollout,
            "old_log_probs": trainer,
            "attention_mask": torch.cat([torch.ones(3, 7), mask], 1),
        },
        non_tensor_batch={mismatch.KEY: numpy.array(["int8", "bf16", None], dtype=object)},
    )
    found = mismatch.calculate_debug_metrics(lambda data: {"training/rollout_probs_diff_max": 1.0}, data)
    assert found["training/rollout_probs_diff_max"] == 1.0
    assert found["mismatch/tokens"] == 120
    assert found["mismatch/tokens/int8"] == found["mismatch/tokens/bf16"] == 40
    assert ledger.notes()["mismatch"]["int8"]["k3"] == pytest.approx(found["mismatch/k3/int8"])


@pytest.mark.parametrize("shape", [list, lambda rows: numpy.array(rows, dtype=object)], ids=["list", "array"])
def test_precisions_come_from_verls_queue_however_it_hands_them_out(monkeypatch, shape) -> None:
    """Equal dicts of all samples arrive as an array, others as a list."""
    rows = [{mismatch.KEY: "int8"}, {mismatch.KEY: "bf16"}, {}, {mismatch.KEY: "int8"}]
    queue = SimpleNamespace(kv_batch_get=lambda **asked: {"extra_fields": shape(rows)})
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    monkeypatch.setattr(mismatch.engine, "options", lambda family: {"fleet": [1, 2]})
    tags = [{"is_padding": number == 3} for number in range(4)]
    batch = SimpleNamespace(keys=list("abcd"), partition_id="p", tags=tags)
    assert mismatch._precisions(batch) == ["int8", "bf16", "", None]
