"""verl's own client in front of rollout servers that are Ray actors, while servers are killed and stopped.

    python grpo_servers.py REQUESTS PHASES

PHASES is a JSON list of [HARM, OPTIONS]: HARM is kill or chaos, OPTIONS those of grpo, or null for stock
verl. Prints one JSON line per phase: how requests ended, and the balancer's last status."""

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


async def phase(requests: int, harm: str, options: dict | None) -> None:
    import flashpatch

    flashpatch.disable()
    if options is not None:
        flashpatch.enable("grpo", **options)
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from flashpatch.patches.grpo.routing import resubmit, router

    resubmit.REST = 1.0  # as long as a server here hangs
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
        for turn in range(1000):
            if harm == "kill":  # by then requests are under way everywhere, and most are still to come
                while ends.total() < requests // 6:
                    await asyncio.sleep(0.01)
            else:
                await asyncio.sleep(draw.uniform(0.3, 1.2))
            name = draw.choice(list(servers)[1:])
            if harm == "kill":
                os.kill(pids[name], signal.SIGKILL)
                happened["kill"] += 1
                return
            elif draw.random() < 0.4:
                os.kill(pids[name], signal.SIGSTOP)
                happened["hang"] += 1
                asyncio.get_running_loop().call_later(draw.uniform(0.5, 4), go_on, pids[name])
            else:
                os.kill(pids[name], signal.SIGCONT)
                os.kill(pids[name], signal.SIGKILL)
                happened["kill"] += 1
                fresh = f"{name[:2]}-{turn}"
                servers[fresh] = Server.remote()
                pids[fresh] = await servers[fresh].pid.remote()
                del servers[name], pids[name]
                await balancer.add_servers.remote({fresh: servers[fresh]})

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
    for name, pid in pids.items():
        go_on(pid)
        ray.kill(servers[name])


def go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    with ray_start.small():
        for harm, options in json.loads(sys.argv[2]):
            asyncio.run(phase(int(sys.argv[1]), harm, options))
