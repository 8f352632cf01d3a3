"""Follow one response whose server dies half-way and whose next server is stopped by an update; without a Ray cluster."""

from __future__ import annotations

import asyncio
from typing import Any

PROMPT, LIMIT = [8, 9, 10], 5
WANTED = {"tokens": [11, 12, 13, 14, 15], "versions": [[1, 2], [2, 1], [3, 2]]}
"""Each token is the one before it plus one; the dead server made two, the stopped one another."""


class _Server:
    """Generate what `WANTED` says, with others: the first call dies after two tokens, the second is stopped after one."""

    def __init__(self, calls: list[int], journal: Any) -> None:
        self._calls, self._journal = calls, journal

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from ray.exceptions import ActorDiedError
        from verl.workers.rollout.replica import TokenOutput

        version = len(self._calls) + 1
        self._calls.append(version)
        count = {1: 2, 2: 1}.get(version, sampling_params["max_tokens"])
        tokens = [prompt_ids[-1] + step for step in range(1, count + 1)]
        if version == 1:
            self._journal.add(request_id, 0, tokens, None, version)
            raise ActorDiedError()
        stopped = "aborted" if version == 2 else "completed"
        return TokenOutput(
            token_ids=tokens, stop_reason=stopped, num_preempted=0, extra_fields={"global_steps": version}
        )


async def resumed(requests: int = 2) -> list[dict[str, Any]]:
    """Return what each of several requests got: its tokens, and the policy versions that it says made them."""
    return [await asyncio.wait_for(_resumed(str(number)), 60) for number in range(requests)]


async def _resumed(request: str) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    from flashpatch.patches.grpo.routing.journal import Journal
    from flashpatch.patches.grpo.streaming.staleness import KEY
    from flashpatch.verify.probes.grpo.route import Remote, balanced

    calls, journal = list[int](), Journal()
    balancer = balanced({name: _Server(calls, journal) for name in ("one", "two")})
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
    client = FullyAsyncLLMServerClient(config, Remote(balancer))
    client._flashpatch_grpo_journal = Remote(journal)
    output = await client.generate(request, prompt_ids=PROMPT, sampling_params={"max_tokens": LIMIT})
    return {"tokens": list(map(int, output.token_ids)), "versions": list(output.extra_fields.get(KEY, ()))}
