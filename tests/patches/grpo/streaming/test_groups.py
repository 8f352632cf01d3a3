"""What a streamed step takes out of verl's queue: groups without an output, and never another job's."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from flashpatch.patches.grpo.streaming import groups

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("cluster")]


@pytest.fixture
def queue() -> Iterator[None]:
    import transfer_queue as tq
    from omegaconf import OmegaConf

    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()


def put(keys: list[str], **tag: object) -> None:
    import transfer_queue as tq
    from tensordict import TensorDict

    fields = TensorDict({"a": torch.zeros(len(keys), 1)}, batch_size=len(keys))
    tq.kv_batch_put(
        keys=keys, partition_id="train", tags=[dict(tag, global_steps=1)] * len(keys), fields=fields
    )


def test_a_group_without_an_output_is_replaced(queue):
    """The prompt was gone and in no count, until none was in flight and the step waited for ever."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    groups.refuse_others()
    asked: list[int] = []
    buffer = ReplayBufferAsync("stream_async", {}, 8, "drop", {}, refill_fn=asked.append)
    put(["full", "empty"], is_prompt=True, status="finished")
    put(["full_0_0", "full_1_0"], status="success", seq_len=2, response_len=1)
    metrics: dict[str, int] = {}
    assert sorted(groups.take(buffer, 1, 2, metrics).keys) == ["full_0_0", "full_1_0"]
    assert asked == [1] and metrics == {groups.EMPTY: 1}
    assert not groups.take(buffer, 1, 2, {}).keys and asked == [1]


OTHER = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
import transfer_queue as tq
tq.init()
from flashpatch.patches.grpo.streaming import groups
try:
    groups.refuse_others()
finally:
    tq.close()  # as verl does
"""


def test_a_second_job_of_a_ray_cluster_is_refused_and_the_first_one_goes_on(queue):
    """It took the first one's samples, and removed those that were being trained on."""
    import ray
    import transfer_queue as tq

    put(["mine_0_0"], status="success", seq_len=2, response_len=1)
    address = ray.get_runtime_context().gcs_address
    other = subprocess.run([sys.executable, "-c", OTHER, address], capture_output=True, text=True)
    assert "cannot train beside another job of this Ray cluster" in other.stderr, other.stderr
    assert list(tq.kv_list("train")["train"]) == ["mine_0_0"]
