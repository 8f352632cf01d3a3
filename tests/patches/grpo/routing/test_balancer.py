"""grpo's balancer without Ray: predictions from what verl's client reports, and shared prompts."""

import asyncio

import pytest
from grpo_balancer import balancer

from flashpatch.patches.grpo.routing.balancer import TokenBalancer
from flashpatch.patches.grpo.routing.lengths import Conversation
from flashpatch.patches.grpo.routing.pool import Pool, threshold


async def generate(ours: TokenBalancer, request: str, prompt: int, tokens: int, complete: bool = True) -> str:
    name, _ = await ours.acquire_server(request, prompt_digest=(prompt, 10))
    await ours.release_server(name, request, tokens=tokens, complete=complete)
    return name


@pytest.mark.parametrize("longest_first", [True, False])
async def test_the_longest_predicted_request_is_next(longest_first):
    ours = balancer("a", most=1, longest_first=longest_first)
    for number in range(12):
        await generate(ours, f"short {number}", 1, 10)
        await generate(ours, f"long {number}", 2, 1000)
    held, _ = await ours.acquire_server("held", prompt_digest=(1, 10))
    order: list[str] = []

    async def ask(request: str, prompt: int) -> None:
        name, _ = await ours.acquire_server(request, prompt_digest=(prompt, 10))
        order.append(request)
        await ours.release_server(name, request, tokens=(10, 1000)[prompt - 1])

    waiting = [asyncio.ensure_future(ask(*one)) for one in (("s1", 1), ("l1", 2), ("s2", 1), ("l2", 2))]
    await asyncio.sleep(0)
    assert ours.get_status()["waiting"] == 4
    waiting[1].cancel()  # a client that gave up
    await asyncio.sleep(0)
    await ours.release_server(held, "held", tokens=10)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == (["l2", "s1", "s2"] if longest_first else ["s1", "s2", "l2"])
    assert ours.get_total_inflight() == ours.get_status()["waiting"] == 0


async def test_what_an_aborted_turn_has_is_no_longer_expected():
    ours = balancer("a")
    for number in range(20):
        await generate(ours, str(number), 7, 400)
    fresh = ours.cost(10, None, Conversation(7))
    assert 300 < fresh < 900
    assert {ours.cost(10, {name: 50}, Conversation(7)) for name in ("max_tokens", "max_new_tokens")} == {60}
    before = ours._lengths.expect((7, 0), 0.0)
    await generate(ours, "cut", 7, 150, complete=False)
    assert ours._lengths.expect((7, 0), 0.0) == before, "an aborted response has no length"
    await ours.acquire_server("cut", prompt_digest=(8, 160))
    assert 140 <= fresh + 150 - next(iter(ours._pool.loads().values())) <= 160
    await ours.release_server("a", "cut", tokens=250)
    # The next turn of it is not like the first.
    assert ours._conversations.begin("cut", (9, 1)).key == (7, 1)


def test_siblings_go_where_their_prompt_is_unless_that_is_fuller_by_more():
    pool = Pool()
    for name in "abc":
        pool.add(name)
    assert pool.acquire(1, 150, shared="p", saving=100) == "a"
    assert pool.acquire(2, 150, shared="p", saving=100) == "b", "a is 150 tokens fuller"
    assert pool.acquire(3, 150, shared="q", saving=100) == "c"
    pool.release(1)
    assert pool.acquire(4, 90) == "a"
    assert pool.acquire(5, 150, shared="p", saving=100) == "a" and pool.loads()["a"] == 90 + 50
    pool.remove("a")
    pool.add("a")
    assert pool.acquire(6, 150, shared="q", saving=100) == "a", "the new a is the emptiest, and has nothing"
    pool.forget_prefixes()
    pool.release(6)
    assert pool.acquire(7, 150, shared="p", saving=100) == "a"


@pytest.mark.parametrize("slots, most", [(1, 2), (16, 17), (32, 34), (1024, 1088), (0, 0)])
def test_the_threshold_leaves_no_slot_empty(slots, most):
    assert threshold(slots) == most


async def test_a_dead_clients_places_are_given_back_and_so_are_those_that_it_waits_for():
    """They were taken for ever: the next request waited without end."""
    ours = balancer("a", most=2)
    for number in range(2):
        await ours.acquire_server(str(number), prompt_digest=(number, 10), client="dead")
    waiting = asyncio.ensure_future(ours.acquire_server("2", prompt_digest=(2, 10), client="dead"))
    alive = [
        asyncio.ensure_future(ours.acquire_server(f"{number}", prompt_digest=(number, 10), client="alive"))
        for number in (3, 4)
    ]
    await asyncio.sleep(0)
    assert ours.get_status()["waiting"] == 3
    assert await ours.forget_client("dead") == 2
    with pytest.raises(RuntimeError, match="client that died"):
        await asyncio.wait_for(waiting, 10)
    for one in alive:
        assert (await asyncio.wait_for(one, 10))[0] == "a"
    assert ours.get_total_inflight() == 2 and ours.get_status()["waiting"] == 0
    with pytest.raises(RuntimeError, match="client that died"):  # on its way when the client died
        await asyncio.wait_for(_asked_after_a_release(ours), 10)
    await ours.release_server("a", "4")
    assert ours.get_total_inflight() == 0


async def _asked_after_a_release(ours: TokenBalancer) -> None:
    await ours.release_server("a", "3")
    await ours.acquire_server("5", prompt_digest=(5, 10), client="dead")


async def test_a_request_whose_limit_is_no_number_fails_alone():
    ours = balancer("a", most=1)
    await ours.acquire_server("0", [1])
    limits = ("64", 64)
    asked = [
        asyncio.ensure_future(ours.acquire_server(limit, [1, 2], {"max_tokens": limit})) for limit in limits
    ]
    await asyncio.sleep(0)
    await ours.release_server("a", "0")
    with pytest.raises(TypeError):
        await asyncio.wait_for(asked[0], 10)
    assert (await asyncio.wait_for(asked[1], 10))[0] == "a"
