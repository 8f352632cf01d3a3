"""A rollout worker that fails or dies in the second update of a real job: the driver ends, and says why."""

import pytest
from verl_job import check_faults, metrics

pytestmark = pytest.mark.verl


@pytest.mark.full
@pytest.mark.parametrize(
    "fault, words",
    [("raise", ("LookupError: cannot place this tensor", "in _update_weights")), ("kill", ("the rollout",))],
)
def test_the_driver_ends_and_says_why(wide_world, tmp_path, fault, words):
    words = ("[flashpatch: fp8.verl_vllm.sender_init_socket]", *words)
    assert metrics(check_faults(wide_world, tmp_path, fault, words), "training/global_step") == []
