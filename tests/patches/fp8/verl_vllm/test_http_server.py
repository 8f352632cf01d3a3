"""Calls to a rollout engine that answers, fails, or ends without an answer."""

import asyncio
import types

import pytest
from machine import limit

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl_vllm import http_server


class Engine:
    """Of vLLM's client: a call that never returns when the engine has ended."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour, self.errored, self.cancelled = behaviour, False, False

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if self.behaviour == "fails":
            raise LookupError("as the worker said")
        if self.behaviour == "ends":
            self.errored = True
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        return [{"method": method, **(kwargs or {})}]


async def stock(self, method, timeout=None, args=(), kwargs=None):
    """As verl 0.9.1 has it: nothing is returned."""
    await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)


async def clear(self):
    await self.engine.collective_rpc("reset")


def call(behaviour: str, method: str):
    actor = types.SimpleNamespace(engine=Engine(behaviour))

    async def run():
        return await asyncio.wait_for(
            http_server.collective_rpc(stock, actor, method, kwargs={"a": 1}), limit(60)
        )

    return asyncio.run(run())


def test_receipts_come_back_and_failures_and_other_calls_stay_as_they_are():
    given = call("answers", "update_weights_from_ipc")
    assert given == [{"method": "update_weights_from_ipc", "a": 1}]
    given = call("answers", "monkey_patch_model")
    assert given is None
    with pytest.raises(LookupError, match="as the worker said"):
        call("fails", "update_weights_from_ipc")


@pytest.mark.parametrize("method", ["update_weights_from_ipc", "finish_weight_update"])
def test_an_engine_that_ends_is_named(method):
    with pytest.raises(
        PatchError, match=f"fp8.verl_vllm.collective_rpc.*the rollout engine ended during {method}"
    ):
        call("ends", method)


def test_also_while_caches_are_cleared():
    actor = types.SimpleNamespace(engine=Engine("ends"))
    with pytest.raises(PatchError, match="ended during clear_kv_cache"):
        asyncio.run(http_server.clear_kv_cache(clear, actor))
    assert actor.engine.cancelled
