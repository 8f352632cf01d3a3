"""verl's real checkpoint manager over a small real Ray: it collects receipts however it is called, and compares."""

from pathlib import Path

import cpu_lab
import pytest
import warm

pytestmark = pytest.mark.verl

CODE = """
import asyncio, sys, time, types
import ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.utils.tracking import Tracking
import flashpatch
from flashpatch import engine
@ray.remote(num_cpus=0)
class Sender:
    def __init__(self, rank):
        self.rank, self.version = rank, 0
    def sync(self, step, by=1):
        from flashpatch.patches.fp8.verl.transfer.receipts import receipt
        from flashpatch.patches.fp8.verl.transfer.weight_sync import Sending
        from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
        before, self.version = self.version, self.version + by
        sending = Sending(step, export=0.5, gather=1.0, send=3.0, bytes=8, tensors=1)
        sending.call = "made"
        worker = dict(id=sending.id, step=step, rank=0, world=1, host="h", pid=self.rank, before=[before],
                      after=[self.version], states=["ready"], adapter=False, retry=False, receive=2.0,
                      load=1.5, process=0.25, bytes=8, tensors=1)
        WEIGHT_SYNC.keep_receipt(receipt(sending, self.rank, 0, [worker], 4.0, True))
    def forget(self):
        from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
        WEIGHT_SYNC.take_receipts()
        self.version -= 2
    def fail(self):
        raise LookupError("one rank fails")
    def hang(self):
        time.sleep(3600)  # in a collective, say, for the one that failed
senders = [Sender.remote(rank) for rank in range(2)]
twice = []
def update_weights(global_steps, mode):
    assert mode == "naive"
    return [sender.sync.remote(global_steps, 2 if sender in twice else 1) for sender in senders]
manager = object.__new__(CheckpointEngineManager)
Replica = type("Replica", (), {"__module__": "verl.workers.rollout.vllm_rollout.vllm_async_server"})
manager.backend, manager.replicas = "naive", [Replica(), Replica()]
manager.actor_wg = types.SimpleNamespace(_workers=senders, update_weights=update_weights)
assert manager.update_weights(1) == {}
async def awaits():
    return await manager.update_weights(global_steps=2)
def plainly():
    return manager.update_weights(3)
async def within_a_loop():
    return plainly()
assert asyncio.run(awaits()) == {}
assert asyncio.run(within_a_loop()) == {}
assert engine.statuses()["fp8.verl.checkpoint_manager_update_weights"].calls == 3
logged = []
tracking = object.__new__(Tracking)
tracking.logger = {"mine": types.SimpleNamespace(log=lambda data, step: logged.append((data, step)))}
mine = {"actor/loss": 0.5}
tracking.log(data=mine, step=3)
tracking.log(mine, 4)
(first, third), (second, fourth) = logged
assert third == 3 and fourth == 4 and second == mine == {"actor/loss": 0.5}, logged
assert first == {**mine, "timing_s/sync/gather": 1.5, "timing_s/sync/transfer": 0.5, "timing_s/sync/load": 1.5,
                 "timing_s/sync/process": 0.25, "timing_s/sync/total": 4.5, "sync/bytes": 16.0, "sync/tensors": 1.0,
                 "sync/policy_version": 3.0}, first
other = type("Replica", (), {"__module__": "verl.workers.rollout.trtllm_rollout.trtllm_async_server"})
manager.replicas = [other()]
assert manager.update_weights(4) == {} and asyncio.run(awaits()) == {}  # nobody is asked, nothing is judged
ray.get([sender.forget.remote() for sender in senders])
manager.replicas = [Replica(), Replica()]
twice.append(senders[1])
try:
    manager.update_weights(4)
except flashpatch.PatchError as error:
    said = str(error)
    assert "replica 1, rank 0: version 3 became 5, not one new one" in said and "replica 0" not in said, said
else:
    raise AssertionError("nobody noticed")
del twice[:]
manager.actor_wg.update_weights = lambda **kwargs: [senders[0].fail.remote(), senders[1].hang.remote()]
try:
    manager.update_weights(5)
except ray.exceptions.RayTaskError as error:
    assert "LookupError: one rank fails" in str(error)
else:
    raise AssertionError("the driver waits for a rank that waits for another")
print("done")
"""


def test_it_collects_compares_and_logs(tmp_path: Path):
    done = cpu_lab.python(CODE, tmp_path, imported=warm.VERL_VLLM, FLASHPATCH="cpu,bf16")
    assert done.returncode == 0 and "done" in done.stdout, cpu_lab.tail(done)
