"""Send requests through verl's client while one of its servers is dead; without a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

REQUESTS = 40


class Remote:
    """Call methods of an object as those of a Ray actor: ``handle.method.remote(...)``."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def remote(*args: Any, **kwargs: Any) -> asyncio.Future[Any]:
            async def call() -> Any:
                found = method(*args, **kwargs)
                return await found if asyncio.iscoroutine(found) else found

            return asyncio.ensure_future(call())

        return SimpleNamespace(remote=remote)


class _Server:
    def __init__(self, alive: bool) -> None:
        self.alive = alive
        self.served = 0

    async def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> Any:
        from ray.exceptions import ActorDiedError

        await asyncio.sleep(0)
        if not self.alive:
            raise ActorDiedError()
        self.served += 1
        return SimpleNamespace(token_ids=list(prompt_ids), extra_fields={})


def balanced(servers: Mapping[str, Any]) -> Any:
    """Return grpo's balancer over servers of this process."""
    from flashpatch.patches.grpo.routing.balancer import TokenBalancer

    thresholds = {"cap": 0, "most": 0, "slack": None, "response_tokens": 64}
    others = {"predict": True, "longest_first": True, "trace": ""}
    return TokenBalancer({name: Remote(server) for name, server in servers.items()}, thresholds | others)


def routed() -> dict[str, Any]:
    """Send requests to three servers, one of them dead, and return how they were answered.

    Returns:
        ``answered``: requests that got their own answer; ``served``: answers by server; ``left``: the
        balancer's servers and outstanding requests at the end; ``learned``: responses whose length the balancer was told.
    """
    return asyncio.run(asyncio.wait_for(_routed(), 60))


async def _routed() -> dict[str, Any]:
    from omegaconf import OmegaConf
    from verl.workers.rollout.llm_server import LLMServerClient

    from flashpatch.patches.grpo.routing.journal import Journal

    servers = {name: _Server(name != "dead") for name in ("one", "two", "dead")}
    balancer = balanced(servers)
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
    client = LLMServerClient(config, Remote(balancer))
    client._flashpatch_grpo_journal = Remote(Journal())
    asked = (
        client.generate(str(number), prompt_ids=[number], sampling_params={"max_tokens": 8})
        for number in range(REQUESTS)
    )
    answers = await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.sleep(0.05)
    status = balancer.get_status()
    right = [getattr(answer, "token_ids", None) == [number] for number, answer in enumerate(answers)]
    return {
        "answered": sum(right),
        "served": {name: server.served for name, server in servers.items()},
        "learned": status["responses"],
        "left": {"servers": sorted(status["servers"]), "outstanding": status["total_inflight"]},
    }
