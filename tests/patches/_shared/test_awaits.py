"""Functions that coroutines and plain functions call alike."""

import asyncio

from flashpatch.patches._shared.awaits import caller_awaits, followed, resolve


def target() -> bool:
    return caller_awaits()


def test_the_frame_that_calls_decides_and_those_of_flashpatch_are_ignored() -> None:
    async def coroutine() -> bool:
        return caller_awaits()

    assert asyncio.run(coroutine()) and not target()
    wrapper = {"__name__": "flashpatch.patches.toy.hook", "caller_awaits": caller_awaits}
    exec("def hook():\n    return caller_awaits()", wrapper)

    async def coroutine() -> bool:
        return wrapper["hook"]()

    assert asyncio.run(coroutine()) and not wrapper["hook"]()


def test_a_result_is_awaited_only_if_it_can_be() -> None:
    async def later() -> int:
        return 3

    async def both() -> tuple[int, int]:
        return await resolve(later()), await resolve(4)

    assert asyncio.run(both()) == (3, 4)


def test_what_follows_a_call_comes_after_it_whoever_calls():
    done = []

    async def slowly():
        done.append("call")
        return 1

    async def driver():
        return await followed(lambda: done.append("after"), slowly)

    assert asyncio.run(driver()) == 1 and done == ["call", "after"]
    assert followed(lambda: done.append("after"), lambda: 2) == 2 and done[2:] == ["after"]
