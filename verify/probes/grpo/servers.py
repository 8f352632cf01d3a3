"""Send requests through verl's clients while servers die or are stopped by an update; without a Ray cluster."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

REQUESTS = 40
PROMPT, LIMIT = [8, 9, 10], 5
WANTED = {"tokens": [11, 12, 13, 14, 15], "versions": [[1, 2], [3, 3]]}
"""Each token is the one before it plus one; the stopped server made two, the dead one nothing that was kept."""


class Remote:
    """Call methods of an object as those of a Ray actor: ``handle.method.remote(...)``."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            return await found if asyncio.iscoroutine(found) else found

        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.ensure_future(call(*args, **kwargs)))


def _client(name: str, servers: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return verl's client of that name, and grpo's balancer over the servers."""
    from omegaconf import OmegaConf
    from verl.workers.rollout import llm_server

    from flashpatch.patches.grpo.routing.balancer import TokenBalancer

    balancer = TokenBalancer({name: Remote(server) for name, server in servers.items()})
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
    return getattr(llm_server, name)(config, Remote(balancer)), balancer


async def routed() -> dict[str, Any]:
    """Send requests to three servers, one of them dead; return how many got their own answer, answers by server, responses
    whose length the balancer was told, and its servers and outstanding requests at the end."""
    from ray.exceptions import ActorDiedError

    served = dict.fromkeys(("one", "two", "dead"), 0)

    async def echo(server: str, request_id: str, prompt_ids: list[int], **_: Any) -> Any:
        await asyncio.sleep(0)
        if server == "dead":
            raise ActorDiedError()
        served[server] += 1
        return SimpleNamespace(token_ids=list(prompt_ids), extra_fields={})

    servers = {name: SimpleNamespace(generate=partial(echo, name)) for name in served}
    client, balancer = _client("LLMServerClient", servers)
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
        "served": served,
        "learned": status["responses"],
        "left": {"servers": sorted(status["servers"]), "outstanding": status["total_inflight"]},
    }


async def resumed(request: str) -> dict[str, Any]:
    """Send a request to servers whose first call is stopped after two tokens, and the second dies; return its tokens, and the policy
    versions that it says made them: see `WANTED`."""
    from ray.exceptions import ActorDiedError
    from verl.workers.rollout.replica import TokenOutput

    from flashpatch.patches.grpo.streaming.staleness import KEY

    versions = itertools.count(1)

    async def generate(request_id: str, prompt_ids: list[int], sampling_params: Any, **_: Any) -> Any:
        version = next(versions)
        if version == 2:
            raise ActorDiedError()
        count = 2 if version == 1 else sampling_params["max_tokens"]
        tokens = [prompt_ids[-1] + step for step in range(1, count + 1)]
        stopped, told = "aborted" if version == 1 else "completed", {"global_steps": version}
        return TokenOutput(token_ids=tokens, stop_reason=stopped, num_preempted=0, extra_fields=told)

    servers = {name: SimpleNamespace(generate=generate) for name in ("one", "two")}
    client, _ = _client("FullyAsyncLLMServerClient", servers)
    output = await client.generate(request, prompt_ids=PROMPT, sampling_params={"max_tokens": LIMIT})
    return {"tokens": list(map(int, output.token_ids)), "versions": list(output.extra_fields.get(KEY, ()))}
