"""A rollout worker that fails or dies in the second update of a real job: the driver ends, and says why."""

import re
from pathlib import Path

import pytest
from tree import SUPPORT
from verl_job import metrics, train, trained

pytestmark = pytest.mark.verl

FAULTY = "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=transfer_fault.Faulty"


@pytest.fixture
def world(wide_world: Path) -> Path:
    return wide_world


@pytest.mark.full
@pytest.mark.parametrize(
    "fault, words",
    [("raise", ("LookupError: cannot place this tensor", "in _update_weights")), ("kill", ("the rollout",))],
)
def test_the_driver_ends_and_says_why(world, tmp_path, fault, words):
    done = train(
        world, tmp_path, FAULTY, FLASHPATCH="cpu,bf16", TRANSFER_FAULT=fault, PYTHONPATH=str(SUPPORT)
    )
    assert done.returncode not in (0, None)
    assert metrics(done.stdout, "training/global_step") == []
    for word in ("[flashpatch: fp8.verl_vllm.sender_init_socket]", *words):
        assert word in done.stdout, done.stdout[-8000:]


@pytest.mark.full
def test_the_parts_of_a_sync_are_logged(world, tmp_path):
    output = trained(world, tmp_path, "trainer.v1.trainer_mode=colocate_async", FLASHPATCH="cpu,bf16")
    for part in ("gather", "transfer", "load", "process", "total"):
        assert min(metrics(output, f"timing_s/sync/{part}")) > 0
    assert metrics(output, "sync/policy_version") == [2, 3]
    assert re.search(r"sync/bytes:\d", output)
