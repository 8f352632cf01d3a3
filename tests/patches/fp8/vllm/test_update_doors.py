"""Every door leads to the same update: naive loads, verl's pattern, vLLM's reload and its transfer session.

And the other door: engines opened without a quantization get the family's precision, whoever opens them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, oracle, scenario

pytestmark = pytest.mark.vllm

FP8 = "fp8_per_channel"


# --- what runs in the engine's process


def register_backend() -> None:
    """A weight-transfer backend that reads a part of a checkpoint, as one that receives it would."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class Disk(WeightTransferEngine):
        init_info_cls = dataclasses.make_dataclass("Start", [])
        kind = ("update_kind", str, "dense")  # asked for by vLLM 0.24
        update_info_cls = dataclasses.make_dataclass("Part", ["path", "part", "parts", kind])

        def init_transfer_engine(self, init_info: Any) -> None:
            """There is no connection to open."""

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any, load_weights: Any = None) -> None:
            items = list(models.weights(update_info.path))
            start, end = (
                len(items) * p // update_info.parts for p in (update_info.part, update_info.part + 1)
            )
            self.model.load_weights(items[start:end])

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """There is no connection to close."""

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            """There is no trainer. Before vLLM 0.28 an engine must have this method."""

    WeightTransferEngineFactory._registry["ipc"] = lambda: Disk  # names that are not vLLM's are refused


def _session(parts: int) -> Callable[[Any, str], None]:
    def through(llm: Any, path: str) -> None:
        llm.start_weight_update()
        for part in range(parts):
            llm.update_weights({"update_info": dict(path=path, part=part, parts=parts)})
        llm.finish_weight_update()

    return through


def _one_call(llm: Any, path: str) -> None:
    engines.inner_model(llm).load_weights(models.weights(path))


def _verl(llm: Any, path: str) -> None:
    items = list(models.weights(path))
    updates.send(llm, [items[i : i + 4] for i in range(0, len(items), 4)])
    updates.finish(llm)


def _by_path(llm: Any, path: str) -> None:
    llm.collective_rpc("reload_weights", kwargs=dict(weights_path=path))


def _by_iterator(llm: Any, path: str) -> None:
    llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=models.weights(path)))


DOORS: dict[str, Callable[[Any, str], None]] = {
    "load_weights": _one_call,
    "verl": _verl,
    "reload by path": _by_path,
    "reload by iterator": _by_iterator,
    "session": _session(1),
    "session in 7 parts": _session(7),
}


def doors(a: str, b: str, kw: dict[str, Any]) -> dict[str, Any]:
    """B and A in turn, through each door."""
    register_backend()
    found: dict[str, Any] = {}
    with engines.open_llm(a, weight_transfer_config=dict(backend="ipc"), **kw) as llm:
        llm.init_weight_transfer_engine({"init_info": {}})
        before = engines.addresses(engines.inner_model(llm))
        for (name, through), path in zip(DOORS.items(), itertools.cycle((b, a))):
            through(llm, path)
            found[name] = dict(path=path, answers=engines.answers(llm))
        found["moved"] = before != engines.addresses(engines.inner_model(llm))
        llm.start_weight_update()
        llm.update_weights({"update_info": dict(path=a, part=0, parts=2)})
        found["unfinished"] = updates.error(llm.finish_weight_update)
        found["refusal"] = updates.refusal(llm)
        llm.collective_rpc("reload_weights")  # from the last path given, as stock vLLM does
        found["by itself"] = engines.answers(llm)
    return found


def precision(model: str, names: list[str], options: dict[str, Any], **kw: Any) -> dict[str, Any]:
    """The quantization that an engine gets, and what it answers."""
    import flashpatch

    flashpatch.enable(*names, **options)
    try:
        with engines.open_llm(model, **kw) as llm:
            return dict(name=llm.llm_engine.model_config.quantization, answers=engines.answers(llm, tokens=4))
    finally:
        flashpatch.disable(*names)


def unquantized(model: str, scheme: str) -> str | None:
    def opened() -> None:
        with engines.open_llm(model, quantization=scheme):
            pass

    return updates.error(opened)


def switched_off(a: str) -> dict[str, Any]:
    """Originals by identity, before and after; and what becomes of an engine that is open meanwhile."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import base_loader, utils
    from vllm.v1.engine.core import EngineCore

    import flashpatch

    def targets() -> list[Any]:
        return [
            utils.initialize_model,
            utils.process_weights_after_loading,
            base_loader.process_weights_after_loading,
            vars(EngineArgs)["create_engine_config"],
            vars(EngineCore)["step"],
            vars(EngineCore)["collective_rpc"],
        ]

    before = targets()
    flashpatch.enable("bf16")
    patched = targets()
    with engines.open_llm(a) as llm:
        model = engines.inner_model(llm)
        own = "load_weights" in vars(model)
        flashpatch.disable("bf16")
        answers = engines.answers(llm)
        after = "load_weights" in vars(model)
    return dict(
        patched=[x is not y for x, y in zip(before, patched)],
        restored=[x is y for x, y in zip(before, targets())],
        shadowed=[own, after],
        answers=answers,
    )


def load_part(worker: Any, path: str, start: int, end: int | None) -> None:
    worker.get_model().load_weights(list(models.weights(path))[start:end])


def asynchronous(a: str, b: str) -> dict[str, Any]:
    """AsyncLLM, as servers use it: its quantization, an update while a request runs, half an update, a request,
    the rest, a request."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    sampling = SamplingParams(temperature=0, max_tokens=engines.TOKENS, ignore_eos=True, detokenize=False)
    long = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, detokenize=False)
    numbers = itertools.count()

    async def running(engine: Any, started: asyncio.Event) -> list[int]:
        async for output in engine.generate({"prompt_token_ids": list(engines.PROMPTS[0])}, long, "long"):
            started.set()
        return list(output.outputs[0].token_ids)

    async def ask(engine: Any) -> list[list[int]]:
        found = []
        for prompt in engines.PROMPTS:
            async for output in engine.generate(
                {"prompt_token_ids": list(prompt)}, sampling, str(next(numbers))
            ):
                last = output
            found.append(list(last.outputs[0].token_ids))
        return found

    async def talk() -> dict[str, Any]:
        with engines.forked():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=a, **engines.DEFAULTS))
        found: dict[str, Any] = dict(name=engine.vllm_config.model_config.quantization)
        try:
            started = asyncio.Event()
            request = asyncio.create_task(running(engine, started))
            await started.wait()
            try:
                await engine.collective_rpc(load_part, args=(b, 0, None))
            except Exception as error:
                found["busy"] = str(error)
            found["long"] = await request
            found["a"] = await ask(engine)
            await engine.collective_rpc(load_part, args=(b, 0, 9))
            try:
                found["half"] = await ask(engine)
            except Exception as error:
                found["refusal"] = f"{type(error.__cause__).__name__}: {error.__cause__}"
            await engine.collective_rpc(load_part, args=(b, 9, None))
            found["b"] = await ask(engine)
        finally:
            engine.shutdown()
        return found

    return asyncio.run(talk())


# --- the tests


@pytest.fixture(scope="module")
def runner() -> Iterator[scenario.Runner]:
    with scenario.Runner({"FLASHPATCH": "bf16"}) as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def bare() -> Iterator[scenario.Runner]:
    """For scenarios that call enable() themselves."""
    with scenario.Runner() as interpreter:
        yield interpreter


A, B = ("qwen2", 0), ("qwen2", 1)


@pytest.mark.parametrize("quantization", [None, pytest.param(FP8, marks=pytest.mark.full)])
def test_every_door_leads_to_the_same_answers(runner: scenario.Runner, quantization: str | None) -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    kw = dict(quantization=quantization)
    got = runner(doors, a, b, kw)
    for door in DOORS:
        want = oracle.answers(got[door]["path"], **kw)
        assert engines.difference(got[door]["answers"], want).exact, door
    assert not got["moved"]
    assert "did not come" in got["unfinished"] and got["refusal"] is not None
    last = got["reload by path"]["path"]
    assert engines.difference(got["by itself"], oracle.answers(last, **kw)).exact


def test_fp8_is_given_to_engines_that_ask_for_nothing(bare: scenario.Runner) -> None:
    a = updates.checkpoint(*A)
    got = bare(precision, a, ["fp8"], {})
    want = oracle.answers(a, quantization=FP8)
    assert got["name"] == FP8
    assert engines.array(got["answers"]["prompt_logprobs"]).tobytes() == (
        engines.array(want["prompt_logprobs"]).tobytes()
    )


@pytest.mark.parametrize(
    ("names", "options", "scheme", "kw", "name"),
    [
        (["fp8"], dict(exclude=["*/qwen2-0*"]), None, {}, None),
        pytest.param(["fp8"], dict(exclude=["*/reward*"]), None, {}, FP8, marks=pytest.mark.full),
        pytest.param(
            ["fp8"], dict(scheme="fp8_per_tensor"), None, {}, "fp8_per_tensor", marks=pytest.mark.full
        ),
        pytest.param(
            ["fp8"], {}, None, dict(quantization="fp8_per_tensor"), "fp8_per_tensor", marks=pytest.mark.full
        ),
        (["fp8"], {}, "int8", {}, "compressed-tensors"),
        pytest.param(["bf16"], {}, None, {}, None, marks=pytest.mark.full),
    ],
    ids=["excluded", "not excluded", "scheme", "explicit", "quantized checkpoint", "bf16"],
)
def test_who_gets_which_precision(
    bare: scenario.Runner,
    names: list[str],
    options: dict[str, Any],
    scheme: str | None,
    kw: dict[str, Any],
    name: str | None,
) -> None:
    model = updates.checkpoint(*A, scheme)
    got = bare(precision, model, names, options, **kw)
    assert got["name"] == name
    wanted = {} if scheme else dict(quantization=name)
    same = engines.array(oracle.answers(model, **wanted)["prompt_logprobs"])
    assert engines.array(got["answers"]["prompt_logprobs"]).tobytes() == same.tobytes()


NVFP4 = pytest.param("nvfp4_per_token", marks=pytest.mark.vllm(least="0.27"))


@pytest.mark.parametrize("scheme", ["int8_per_channel_weight_only", NVFP4])
def test_a_scheme_that_quantizes_nothing_is_refused(runner: scenario.Runner, scheme: str) -> None:
    error = runner(unquantized, updates.checkpoint(*A), scheme)
    assert error is not None and "PatchError" in error and scheme in error and "unquantized" in error


def test_disable_leaves_nothing_behind(bare: scenario.Runner) -> None:
    a = updates.checkpoint(*A)
    got = bare(switched_off, a)
    assert all(got["patched"]) and all(got["restored"])
    assert got["shadowed"] == [True, False]
    assert engines.difference(got["answers"], oracle.answers(a)).exact


def test_the_asynchronous_engine() -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    got = scenario.run(asynchronous, a, b, env={"FLASHPATCH": "fp8"})
    assert got["name"] == FP8 and "half" not in got
    assert "requests are running" in got["busy"] and len(got["long"]) == 120
    assert got["long"][: engines.TOKENS] == got["a"][0]
    assert "PatchError" in got["refusal"] and "did not come" in got["refusal"]
    for source, path in (("a", a), ("b", b)):
        assert got[source] == oracle.answers(path, quantization=FP8)["tokens"]
