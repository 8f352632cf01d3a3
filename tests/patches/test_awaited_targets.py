"""verl's manager of weights, awaited as its fully asynchronous trainer does, stays on its caller's loop beneath every patch."""

import os

import pytest
import warm
from machine import limit

CODE = """
import asyncio, threading
from verl.checkpoint_engine import base
base.ray.get = lambda results: results  # of no worker
loops = []

def note(*_, **__):
    loops.append(threading.current_thread() is threading.main_thread() and asyncio.get_running_loop())
    return []

class Actor:
    _workers = []
    update_weights = note

class Replica:
    async def sleep(self):
        note()

async def calls():
    manager = object.__new__(base.CheckpointEngineManager)
    manager.backend, manager.actor_wg, manager.replicas = "naive", Actor(), []
    await manager.update_weights(1)
    await asyncio.gather(manager.update_weights(2))
    manager.replicas = [Replica()]
    await manager.sleep_replicas()
    await asyncio.gather(manager.sleep_replicas())
    assert loops == [asyncio.get_running_loop()] * 4, loops

asyncio.run(calls())
manager = object.__new__(base.CheckpointEngineManager)
manager.backend, manager.actor_wg, manager.replicas = "naive", Actor(), []
assert manager.update_weights(4) == {} and len(loops) == 5
"""


@pytest.mark.verl
@pytest.mark.parametrize("names", ["", "eagle", "fp8", "fp8,eagle,grpo,fsdp,flowrl"])
def test_awaited_targets_stay_on_the_callers_loop(names, tmp_path):
    env = {**os.environ, "FLASHPATCH": names, "FLASHPATCH_LEDGER": str(tmp_path)}
    done = warm.run(warm.VERL, ["-c", CODE], env=env, cwd=tmp_path, timeout=limit(300))
    assert done.returncode == 0, done.stderr[-3000:]
