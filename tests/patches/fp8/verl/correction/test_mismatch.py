"""The monitor: known gaps are measured, and a mixed batch is told apart."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

numpy = pytest.importorskip("numpy")

from hypothesis import example, given
from hypothesis import strategies as st

from flashpatch import ledger
from flashpatch.patches.fp8.mismatch.monitor import Batch, measure, observe
from flashpatch.patches.fp8.verl.correction import mismatch


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


def batch_of(gap: dict[int, float], tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    d = torch.stack([size * torch.randn(tokens, generator=noise) for size in gap.values()])
    rollout = -torch.rand(d.shape, generator=noise) - 1
    return rollout, rollout + d, torch.ones_like(d)


def test_a_mixed_batch_is_told_apart_and_padding_left_out() -> None:
    tensors = batch_of({0: 0.01, 1: 0.05, 2: 9.0, 3: 0.05})
    found = observe(*tensors, Batch(2.0, ["bf16", "int8", None, "int8"]))
    assert found["mismatch/tokens"] == 120 and found["mismatch/tokens/int8"] == 80
    assert found["mismatch/k3/bf16"] < 1e-3 < found["mismatch/k3/int8"]


def test_verls_metrics_stay_and_ours_join(monkeypatch) -> None:
    monkeypatch.setattr(mismatch.engine, "options", lambda family: {"fleet": []})
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
