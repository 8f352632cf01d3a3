"""Which requests an update meets: those that have begun, also while the engine is paused; none that only waits."""

import asyncio
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, oracle, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

TOKENS = engines.TOKENS
SHORT = dict(max_num_batched_tokens=32, enable_prefix_caching=True, block_size=32)  # a prompt takes two steps
RUN = "requests are running"


# --- what runs in the engine's process


def steps(llm: Any, times: int) -> None:
    assert not engines.step(llm, times)


def rest(llm: Any) -> list[list[int]]:
    """The tokens of all requests, finished."""
    ended: list[list[int]] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs = (one for output in llm.llm_engine.step() for one in output.outputs)
        ended += [list(one.token_ids) for one in outputs if one.finish_reason is not None]
    return ended


def paused(a: str, b: str) -> dict[str, Any]:
    """Updates of a paused engine under in_flight=refuse: errors, and how its requests end."""
    found: dict[str, Any] = {}
    with engines.open_llm(a, **SHORT) as llm:
        core = llm.llm_engine.engine_core.engine_core

        def update(name: str, clear: bool) -> None:
            core.pause_scheduler("keep", clear)
            found[name] = [updates.error(lambda: updates.send(llm, [list(models.weights(b))]))]
            core.resume_scheduler()
            found[name].append(rest(llm))

        for clear in False, True:
            engines.add(llm, f"half {clear}")
            steps(llm, TOKENS // 2)
            update(f"half {clear}", clear)
        engines.add(llm, "prompt")
        steps(llm, 1)
        update("half a prompt", False)
        engines.add(llm, "several", n=2, temperature=1.0)
        steps(llm, TOKENS // 2)
        update("several", False)
        core.pause_scheduler("keep", False)
        engines.add(llm, "waits")
        update("waits", False)
    return found


def begun_meanwhile(a: str, b: str) -> dict[str, Any]:
    """A request begins under the old policy while an update is open: how it ends, then an update by itself."""
    items = list(models.weights(b))
    found: dict[str, Any] = {}
    with opened("bf16", a, options=dict(atomic="model")) as llm:
        for name, parts in dict(bucket=[items[:9], items[9:]], end=[items, []]).items():
            llm.collective_rpc(begin)
            updates.send(llm, parts[:1])
            engines.add(llm, name)
            steps(llm, TOKENS // 2)
            error = updates.error(
                lambda: updates.send(llm, parts[1:]) if parts[1] else llm.collective_rpc(end)
            )
            found[name] = [error, rest(llm)]
        updates.send(llm, [items])
        found["b"] = engines.greedy(llm)
    return found


def begin(worker: Any) -> None:
    managed(worker).begin()


def end(worker: Any) -> None:
    managed(worker).finish()


def managed(worker: Any) -> Any:
    from flashpatch.patches.fp8 import model_registry

    return model_registry.get(worker.get_model())


def apart(a: str, b: str, mode: str) -> dict[str, Any]:
    """An engine core in a process of its own, paused and updated as trainers do it, half of an answer in."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import flashpatch

    flashpatch.enable("bf16", in_flight=mode)
    sampling = engines.sampling(120)

    async def ask(engine: Any, name: str, seen: list[Any]) -> None:
        async for output in engine.generate({"prompt_token_ids": list(engines.PROMPTS[0])}, sampling, name):
            seen.append(output)

    async def talk() -> dict[str, Any]:
        with engines.forked():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=a, **engines.DEFAULTS))
        found: dict[str, Any] = dict(error=None)
        try:
            met: list[Any] = []
            request = asyncio.create_task(ask(engine, "met", met))
            while not met:
                await asyncio.sleep(0.001)
            await engine.pause_generation(mode="keep", clear_cache=False)
            found["before"] = len(met[-1].outputs[0].token_ids)
            try:
                await engine.collective_rpc("reload_weights", kwargs=dict(weights_path=b))
            except Exception as error:
                found["error"] = str(error)
            await engine.resume_generation()
            await request
            after: list[Any] = []
            await ask(engine, "after", after)
            found |= {name: engines.tokens_of(seen[-1]) for name, seen in (("met", met), ("after", after))}
            found["reason"] = met[-1].outputs[0].finish_reason
        finally:
            engine.shutdown()
        return found

    return asyncio.run(talk())


# --- the tests


def test_a_pause_does_not_hide_requests(bf16: scenario.Runner, ab: tuple[str, str]) -> None:
    old, new = (oracle.answers(policy)["tokens"][0] for policy in ab)
    got = bf16(paused, *ab)
    for name in "half False", "half True", "half a prompt":
        error, tokens = got[name]
        assert error is not None and RUN in error and tokens == [old], (name, error)
    error, samples = got["several"]
    assert error is not None and RUN in error and len(samples) == 2
    assert got["waits"] == [None, [new]]


def test_a_request_that_begins_while_an_update_is_open(ab: tuple[str, str]) -> None:
    old, new = (oracle.answers(policy)["tokens"] for policy in ab)
    got = scenario.run(begun_meanwhile, *ab)
    for name in "bucket", "end":
        error, tokens = got[name]
        assert error is not None and RUN in error and tokens == [old[0]], (name, error)
    assert got["b"] == new


@pytest.mark.parametrize(
    "mode", ["recompute", *(pytest.param(m, marks=pytest.mark.full) for m in ("refuse", "abort", "keep"))]
)
def test_each_way_while_paused_in_a_process_of_its_own(mode: str, ab: tuple[str, str]) -> None:
    got = scenario.run(apart, *ab, mode)
    old, new = (oracle.answers(policy)["tokens"][0] for policy in ab)
    before, met = got["before"], got["met"]
    assert met[:TOKENS][:before] == old[:before]
    if mode == "refuse":
        assert got["error"] is not None and RUN in got["error"]
        assert met == got["after"] and met[:TOKENS] == old
        return
    assert got["error"] is None and got["after"][:TOKENS] == new
    assert (len(met) < 120, got["reason"]) == ((True, "abort") if mode == "abort" else (False, "length"))
