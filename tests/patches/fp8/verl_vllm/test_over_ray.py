"""The trainer's side in a real asynchronous Ray actor, whose event loop the transfer blocks: it hears all the same."""

from pathlib import Path

import cpu_lab
import pytest
from machine import limit

pytestmark = pytest.mark.verl

CODE = """
import asyncio, os, sys, time, types
import ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)

@ray.remote(num_cpus=0)
class Server:
    '''A rollout server whose worker never connects.'''

    def __init__(self, fate):
        self.fate = fate

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        await asyncio.sleep(2)
        if self.fate == "killed":
            os._exit(1)
        raise LookupError("the worker could not prepare")

@ray.remote(num_cpus=0)
class Trainer:
    async def sync(self, server):
        import torch
        from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
        adapter = object.__new__(ServerAdapter)
        adapter.replica_rank = adapter.rollout_rank = 0
        adapter.use_shm, adapter.zmq_handle, adapter._has_server = True, f"ipc:///tmp/over-ray-{os.getpid()}.sock", True
        adapter.config = types.SimpleNamespace(
            checkpoint_engine=types.SimpleNamespace(update_weights_bucket_megabytes=1))
        adapter.server_handle = server
        await adapter.update_weights(iter([("w", torch.zeros(4))]), global_steps=1)

call = Trainer.remote().sync.remote(Server.remote(sys.argv[1]))
try:
    ray.get(call, timeout=float(sys.argv[2]))
except ray.exceptions.GetTimeoutError:
    print("hung")
except ray.exceptions.RayTaskError as error:
    print("raised", str(error))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "fate, said", [("raises", "LookupError: the worker could not prepare"), ("killed", "The actor died")]
)
def test_a_worker_that_never_connects(tmp_path: Path, fate, said):
    arguments = (fate, str(limit(240)))
    done = cpu_lab.python(CODE, tmp_path, timeout=400, arguments=arguments, FLASHPATCH="cpu,bf16")
    for words in ("[flashpatch: fp8.verl_vllm.sender_init_socket]", said):
        assert words in done.stdout, cpu_lab.tail(done)
