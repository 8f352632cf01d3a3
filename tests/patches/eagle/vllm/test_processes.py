"""Engines of several processes, of EAGLE-3 drafters, and of none."""

import pytest
import torch
from eagle_job_common import prompts
from eagle_reference import states

from flashpatch import ledger
from flashpatch.patches.eagle.capture.sample_queue import SampleReader

pytestmark = [pytest.mark.vllm, pytest.mark.full]

CLOSE = 2e-4


@pytest.fixture(scope="module")
def ranks(job):
    return job("ranks", VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")


def test_one_process_decides_for_all_ranks(ranks):
    seen, at = ranks
    [run] = ledger.read(at / "ledger")
    deciding = [row for row in run.rows if "eagle_bandit" in row.notes]
    assert [row.roles for row in deciding] == [["engine-core"]] or [tuple(row.roles) for row in deciding] == [
        ("engine-core",)
    ]
    assert deciding[0].notes["eagle_bandit"]["steps"] > 20
    workers = [row for row in run.rows if "worker" in row.roles]
    assert sorted(row.rank["tp"] for row in workers) == [0, 1]
    assert len({row.pid for row in [*workers, *deciding]}) == 3


def test_one_rank_captures(ranks):
    seen, at = ranks
    first, second = sorted(seen["flush"], key=len, reverse=True)
    assert first["requests"] >= len(prompts()) and second == {}
    samples = SampleReader(at / "queue").read_samples(999)
    said = [p + t for row in seen["tokens"] for p, t in zip(prompts(), row, strict=True)]
    for one in samples:
        assert one.input_ids.tolist() in said
        wanted, _ = states(at / "chain", one.input_ids.tolist())
        assert float((one.hidden - wanted)[one.known].abs().max()) < CLOSE


def test_all_ranks_take_new_weights_or_none(ranks):
    seen, at = ranks
    assert seen["update"] == [{"version": 1, "tensors": 9}] * 2
    assert "shares with the target" in seen["refused"]
    assert seen["tokens"][0] == seen["tokens"][1]


def test_the_layers_of_eagle3_are_captured(job):
    seen, at = job("layers")
    samples = SampleReader(at / "queue").read_samples(999)
    assert len(samples) >= len(prompts())
    for one in samples:
        side, _ = states(at / "deep", one.input_ids.tolist(), tuple(seen["layers"]))
        assert one.auxiliary.shape == side.shape
        # Inside the model states are not normalised, and grow from layer to layer.
        assert float((one.auxiliary - side)[one.known].abs().max()) < CLOSE * float(side.abs().max())
        last, _ = states(at / "deep", one.input_ids.tolist())
        assert float((one.hidden - last)[one.known].abs().max()) < CLOSE


def test_an_engine_that_does_not_speculate_is_captured(job):
    seen, at = job("plain")
    samples = SampleReader(at / "queue").read_samples(999)
    assert len(samples) >= len(prompts()) and "no drafter with weights" in seen["refused"]
    for one in samples:
        wanted, _ = states(at / "target", one.input_ids.tolist())
        assert float((one.hidden - wanted)[one.known].abs().max()) < CLOSE
        assert torch.equal(one.known, torch.arange(len(one)) < len(one) - 1) or not bool(one.known[0])
