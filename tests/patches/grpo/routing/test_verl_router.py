"""verl's own client and balancers in front of servers that die: what stock verl loses, and what is lost with
grpo."""

import asyncio
import json
from pathlib import Path

import grpo_lab
import pytest
import warm
from grpo_balancer import balancer
from machine import limit
from tree import SUPPORT

pytestmark = pytest.mark.verl


def phases(folder: Path, requests: int, *given, timeout: float = 400) -> list[dict]:
    """What the script said, phase by phase."""
    script = SUPPORT / "grpo_servers.py"
    command, env = [script, str(requests), json.dumps(given)], grpo_lab.environment(folder)
    done = warm.run(warm.VERL, command, env=env, cwd=folder, timeout=limit(timeout))
    assert done.returncode == 0, grpo_lab.tail(done)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"ends"')]


def test_one_dead_server_and_what_becomes_of_its_requests(tmp_path):
    (ours,) = phases(tmp_path, 240, {"router": True})
    assert ours["token router"] and ours["happened"]["kill"] == 1, ours
    assert ours["ends"] == {"result": 240}, ours
    assert ours["status"]["active_servers"] == 3 and ours["status"]["total_inflight"] == 0
    assert set(ours["status"]["tokens"].values()) == {0} and ours["status"]["waiting"] == 0
    # verl's client told the length of every response.
    assert ours["status"]["responses"] == 240


def test_the_balancer_speaks_verls_protocol():
    from verl.workers.rollout.router import GlobalRequestLoadBalancer, RequestLoadBalancer

    ours = balancer()
    for kind in (RequestLoadBalancer, GlobalRequestLoadBalancer):
        for name in vars(kind):
            if not name.startswith("_"):
                assert callable(getattr(ours, name)), name
    status = GlobalRequestLoadBalancer({}).get_status()
    assert set(status) <= set(ours.get_status())


async def test_thresholds_hold_requests_back_and_leaving_servers_let_go():
    ours = balancer(most=1, longest_first=False)
    ask = dict(sampling_params={"max_tokens": 50})
    prompts = ([number] * 50 for number in range(99))
    places = [await ours.acquire_server(str(number), next(prompts), **ask) for number in range(2)]
    late = asyncio.ensure_future(ours.acquire_server("late", next(prompts), **ask))
    later = asyncio.ensure_future(ours.acquire_server("later", next(prompts), **ask))
    await asyncio.sleep(0)
    assert not late.done() and ours.get_status()["waiting"] == 2
    await ours.release_server(places[0][0], "0")
    assert (await late)[0] == places[0][0] and not later.done()
    await ours.remove_servers(["a", "b"])
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        await later
    await ours.add_servers({"c": "C"})
    assert await ours.acquire_server("new", next(prompts), **ask) == ("c", "C")
    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now  # it stands still until the rest is to be over
    await ours.rest_server("c", 5.0)
    await ours.release_server("c", "new")
    resting = asyncio.ensure_future(ours.acquire_server("newer", next(prompts), **ask))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not resting.done()
    now += 6.0
    assert (await resting)[0] == "c"
