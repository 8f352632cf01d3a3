"""A rollout worker that fails or dies in the second update of a real job: the driver ends, and says why."""

from pathlib import Path

import pytest
from tree import SUPPORT
from verl_job import metrics, train

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
