"""verl's own client in front of rollout servers that are Ray actors, of which one is killed.

    python grpo_servers.py REQUESTS PHASES

PHASES is a JSON list of the options of grpo, or null for stock verl. Prints one JSON line per phase: how requests ended, and
the balancer's last status."""

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from types import SimpleNamespace

import ray
import ray_start
from omegaconf import OmegaConf


@ray.remote(num_cpus=0, max_concurrency=1000)
class Server:
    """Answers like a rollout server: after a while, with as many tokens as were asked for."""

    def pid(self) -> int:
        return os.getpid()

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None):
        await asyncio.sleep(sampling_params["work"])
        return SimpleNamespace(token_ids=[prompt_ids[0]] * sampling_params["max_tokens"], extra_fields={})


async def phase(requests: int, options: dict | None) -> None:
    import flashpatch

    flashpatch.disable()
    if options is not None:
        flashpatch.enable("grpo", **options)
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from flashpatch.patches.grpo.routing import router

    router._slots.set(16)
    draw = random.Random(3)
    servers = {f"s{number}": Server.remote() for number in range(4)}
    pids = dict(zip(servers, ray.get([server.pid.remote() for server in servers.values()]), strict=True))
    balancer = get_router_handle(servers=dict(servers))
    client = LLMServerClient(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}}), balancer)
    ends: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    window = asyncio.Semaphore(100)

    async def one(number: int) -> None:
        tokens = 1 + number % 7
        async with window:
            try:
                output = await client.generate(
                    str(number),
                    prompt_ids=[number] * (1 + number % 5),
                    sampling_params={"max_tokens": tokens, "work": min(draw.lognormvariate(-5, 1), 0.3)},
                )
                ends["result" if output.token_ids == [number] * tokens else "another's result"] += 1
            except Exception as error:
                ends[type(error).__name__] += 1

    async def villain() -> None:
        while ends.total() < requests // 6:  # requests are under way everywhere, and most are still to come
            await asyncio.sleep(0.01)
        os.kill(pids[draw.choice(list(servers)[1:])], signal.SIGKILL)
        happened["kill"] += 1

    task = asyncio.create_task(villain())
    await asyncio.gather(*(one(number) for number in range(requests)))
    task.cancel()
    status = await balancer.get_status.remote()
    for _ in range(600 if options is not None else 0):  # releases are not awaited
        if not status["total_inflight"] and not any(status.get("tokens", {}).values()):
            break
        await asyncio.sleep(0.1)
        status = await balancer.get_status.remote()
    known = "tokens" in status
    print(
        json.dumps({"ends": ends, "happened": happened, "status": status, "token router": known}), flush=True
    )
    for server in servers.values():
        ray.kill(server)


if __name__ == "__main__":
    with ray_start.small():
        for options in json.loads(sys.argv[2]):
            asyncio.run(phase(int(sys.argv[1]), options))
