"""`flashpatch.update`: what is sent to an engine within is one update, whichever engine it is and whatever the order."""

import asyncio
import random
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm


# --- what runs in the engine's process


def load(worker: Any, path: str, numbers: list[int]) -> None:
    """Load some tensors of a checkpoint on a rank."""
    items = list(models.weights(path))
    worker.model_runner.model.load_weights([items[number] for number in numbers])


def parts(path: str, seed: int) -> list[list[int]]:
    """The numbers of a checkpoint's tensors in random order, a few in each part."""
    numbers = list(range(len(list(models.weights(path)))))
    random.Random(seed).shuffle(numbers)
    return [numbers[start : start + 3] for start in range(0, len(numbers), 3)]


def offline(a: str, b: str, c: str, inner: bool, **kw: Any) -> dict[str, Any]:
    """B, then half of C and an exception, then C: answers or refusals during and after each."""
    import flashpatch

    found: dict[str, Any] = {}

    def ask() -> Any:
        answers: list[Any] = []
        return updates.error(lambda: answers.append(engines.greedy(llm))) or answers[0]

    def send(path: str, seed: int, until: int = 1000) -> None:
        with flashpatch.update(llm.llm_engine if inner else llm):
            for number, part in enumerate(parts(path, seed)):
                if number == until:
                    raise OSError("the sender's connection broke")
                llm.collective_rpc(load, args=(path, part))
                if number == 2:
                    found.setdefault("during", []).append(ask())
                    found["second"] = updates.error(flashpatch.update(llm).__enter__)

    with opened("bf16", a, options=dict(atomic="model" if inner else "layer"), **kw) as llm:
        found["first"] = [updates.error(lambda: send(b, 1)), ask()]
        found["broken"] = [updates.error(lambda: send(c, 2, until=5)), ask()]
        found["last"] = [updates.error(lambda: send(c, 3)), ask()]
    return found


def online(a: str, b: str) -> dict[str, Any]:
    """An asynchronous engine in a process of its own: without ``async``, then B with a part left out, then B."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import flashpatch

    flashpatch.enable("bf16")

    async def ask(engine: Any, name: str) -> list[int]:
        asked = engine.generate({"prompt_token_ids": list(engines.PROMPTS[0])}, engines.sampling(), name)
        *_, last = [output async for output in asked]
        return engines.tokens_of(last)

    async def send(engine: Any, sent: list[list[int]]) -> str | None:
        try:
            async with flashpatch.update(engine):
                for part in sent:
                    await engine.collective_rpc(load, args=(b, part))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    async def talk() -> dict[str, Any]:
        with engines.forked():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=a, **engines.DEFAULTS))
        try:
            found: dict[str, Any] = {"sync": updates.error(flashpatch.update(engine).__enter__)}
            found["old"] = await ask(engine, "old")
            found["cut"] = await send(engine, parts(b, 4)[1:])
            found["whole"] = await send(engine, parts(b, 4))
            found["new"] = await ask(engine, "new")
            return found
        finally:
            engine.shutdown()

    return asyncio.run(talk())


def unfollowed(a: str) -> str | None:
    import flashpatch

    with engines.open_llm(a) as llm:
        return updates.error(flashpatch.update(llm).__enter__)


def fresh(*paths: str) -> list[Any]:
    answers = []
    for path in paths:
        with engines.open_llm(path) as llm:
            answers.append(engines.greedy(llm))
    return answers


# --- the tests


@pytest.fixture(scope="module")
def abc() -> dict[str, Any]:
    """Three checkpoints, and what a stock engine says on each."""
    paths = [updates.checkpoint("qwen2", seed) for seed in (0, 1, 2)]
    return dict(paths=paths, said=scenario.run(fresh, *paths))


CASES = [
    pytest.param(False, {}, id="LLM"),
    pytest.param(True, {}, id="LLMEngine"),
    pytest.param(False, dict(processes=True, fork=True), id="apart"),
    pytest.param(False, dict(tensor_parallel_size=2, fork=True), id="ranks", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("inner", "kw"), CASES)
def test_what_comes_within_is_one_update(abc: dict[str, Any], inner: bool, kw: dict[str, Any]) -> None:
    found = scenario.run(offline, *abc["paths"], inner, **kw)
    a, b, c = abc["said"]
    assert found["first"] == [None, b] and found["last"] == [None, c]
    error, after = found["broken"]
    assert "connection broke" in error and "another flashpatch.update" in found["second"]
    if inner:  # atomic="model": the old policy serves
        assert found["during"] == [a, b, b] and after == b
    else:
        assert all("PatchError" in refusal for refusal in [*found["during"], after])
        assert "given up" in after


def test_an_asynchronous_engine(abc: dict[str, Any]) -> None:
    found = scenario.run(online, *abc["paths"][:2])
    assert "async with" in found["sync"]
    assert "PatchError" in found["cut"] and "did not come" in found["cut"]
    assert found["whole"] is None
    assert [found["old"], found["new"]] == [said[0] for said in abc["said"][:2]]


def test_an_engine_without_flashpatch_is_named(abc: dict[str, Any]) -> None:
    assert "does not follow the weights" in scenario.run(unfollowed, abc["paths"][0])
