"""What a streamed step takes out of verl's queue: groups without an output, and the samples of another job."""

from collections.abc import Iterator

import pytest
import torch

from flashpatch.errors import PatchError
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


def test_a_group_without_an_output_is_replaced_and_another_jobs_samples_are_refused(queue):
    """The prompt was gone and in no count, until none was in flight and the step waited for ever."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    groups.refuse_others()
    asked: list[int] = []
    buffer = ReplayBufferAsync("stream_async", {}, 8, "drop", {}, refill_fn=asked.append)
    put(["full", "empty"], is_prompt=True, status="finished")
    put(["full_0_0", "full_1_0"], status="success", seq_len=2, response_len=1)
    assert sorted(groups.take(buffer, 1, 2, {}).keys) == ["full_0_0", "full_1_0"] and asked == [1]
    assert not groups.take(buffer, 1, 2, {}).keys and asked == [1]
    with pytest.raises(PatchError, match="another job of this Ray cluster"):
        groups.refuse_others()
