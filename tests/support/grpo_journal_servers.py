"""verl's own client and rollout servers that are Ray actors, one of which dies while it generates.

    python grpo_journal_servers.py OPTIONS

OPTIONS is a JSON object of grpo's options. The servers report through the very generator that wraps vLLM's; the token
that follows a sequence is a function of the sequence, so a response that goes on elsewhere is known exactly. Prints a
JSON line: the response, what was asked of each server, and what the journal keeps in the end.
"""

import asyncio
import json
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import ray
import ray_start
from omegaconf import OmegaConf

LENGTH, DIES_AFTER = 40, 25
PROMPT = [3, 1, 4, 1, 5]
CONFIG = {"actor_rollout_ref": {"rollout": {"name": "vllm", "prompt_length": 8, "response_length": LENGTH}}}


def following(sequence: list[int]) -> int:
    return sum((at + 1) * token for at, token in enumerate(sequence)) % 97


class Engine:
    """In the place of vLLM's: a token per step, all tokens so far in each output."""

    def __init__(self, dies: bool) -> None:
        self._dies, self.may_die = dies, asyncio.Event()

    async def generate(self, prompt: list[int], sampling_params: dict[str, Any], request_id: str) -> Any:
        from flashpatch.patches.grpo.routing import journal

        tokens: list[int] = []
        while len(tokens) < sampling_params["max_tokens"]:
            tokens.append(following([*prompt, *tokens]))
            if self._dies and len(tokens) > DIES_AFTER:
                await self.may_die.wait()
                await journal.find().size.remote()  # answered after all that this process has reported
                os.kill(os.getpid(), signal.SIGKILL)
            last = len(tokens) == sampling_params["max_tokens"]
            logprobs = [{token: SimpleNamespace(logprob=-token / 100)} for token in tokens]
            one = SimpleNamespace(
                token_ids=list(tokens), logprobs=logprobs, finish_reason="length" if last else None
            )
            yield SimpleNamespace(outputs=[one])
            await asyncio.sleep(0)


@ray.remote(num_cpus=0, max_concurrency=100)
class Server:
    """Answers as verl's vLLM server does, on an engine that may die."""

    def __init__(self, dies: bool, version: int, options: dict[str, Any]) -> None:
        import flashpatch

        flashpatch.enable("grpo", **options)
        self.engine, self.global_steps, self.asked = Engine(dies), version, []

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None):
        from flashpatch.patches.grpo.routing import journal

        self.asked.append([len(prompt_ids), sampling_params["max_tokens"]])

        async def answer(server: Any) -> Any:
            outputs = journal.engine_generate(
                type(self.engine).generate, self.engine, prompt_ids, sampling_params, request_id
            )
            async for output in outputs:
                last = output.outputs[0]
            logprobs = [at[token].logprob for token, at in zip(last.token_ids, last.logprobs, strict=True)]
            return SimpleNamespace(
                token_ids=last.token_ids,
                log_probs=logprobs,
                stop_reason="completed",
                extra_fields={"global_steps": self.global_steps},
            )

        return await journal.server_generate(answer, self)

    async def seen(self) -> list[list[int]]:
        return self.asked

    async def let_die(self) -> None:
        self.engine.may_die.set()


async def main(options: dict[str, Any]) -> None:
    import flashpatch

    flashpatch.enable("grpo", **options)
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from flashpatch.patches.grpo.routing import journal
    from flashpatch.patches.grpo.streaming import staleness

    held = journal.start()
    servers = {"dies": Server.remote(True, 6, options), "lives": Server.remote(False, 7, options)}
    await asyncio.gather(*(server.seen.remote() for server in servers.values()))
    balancer = get_router_handle(servers={"dies": servers["dies"]})
    client = LLMServerClient(OmegaConf.create(CONFIG), balancer)
    parts = staleness.Parts()
    staleness._parts.set(parts)
    sampling = {"temperature": 1.0, "logprobs": True, "max_tokens": LENGTH}
    asked = asyncio.ensure_future(client.generate("one", prompt_ids=PROMPT, sampling_params=sampling))
    while not await servers["dies"].seen.remote():
        await asyncio.sleep(0.05)
    await balancer.add_servers.remote({"lives": servers["lives"]})
    await servers["dies"].let_die.remote()
    output = await asked
    for _ in range(600):  # the journal is told without waiting
        if not await held.size.remote():
            break
        await asyncio.sleep(0.1)
    found = {
        "tokens": list(output.token_ids),
        "logprobs": list(output.log_probs),
        "extra": sorted(output.extra_fields),
        "min": output.extra_fields["min_global_steps"],
        "versions": list(parts),
        "asked": await servers["lives"].seen.remote(),
        "kept": await held.size.remote(),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    with ray_start.small():
        asyncio.run(main(json.loads(sys.argv[1])))
