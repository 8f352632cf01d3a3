"""What writes weights, or computes on them, past the engine's own call: followed, or refused by name."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, oracle, scenario
from vllm_precisions import opened

from flashpatch import ledger

pytestmark = pytest.mark.vllm

CACHED = dict(enable_prefix_caching=True, block_size=32)
TP2 = dict(tensor_parallel_size=2, fork=True)


# --- what runs on a worker


def load(worker: Any, path: str) -> None:
    worker.get_model().load_weights(models.weights(path))


def rank(worker: Any) -> int:
    return worker.rank


# --- what runs in the client's process


def unarmed_workers(a: str) -> str | None:
    """Open an engine whose core has FlashPatch on and whose workers have not."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    import flashpatch

    main = WorkerProc.worker_main

    def worker_main(*args: Any, **kwargs: Any) -> None:
        flashpatch.disable()
        main(*args, **kwargs)

    WorkerProc.worker_main = staticmethod(worker_main)
    try:
        with engines.open_llm(a, **TP2) as llm:
            llm.llm_engine.collective_rpc("reload_weights")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        WorkerProc.worker_main = staticmethod(main)
    return None


def through_the_executor(a: str, b: str) -> dict[str, Any]:
    """Beside another engine with a model in this process, load on two ranks by the executor, past the engine core."""
    found: dict[str, Any] = {}
    with engines.open_llm(a, **TP2, **CACHED) as llm, engines.open_llm(a):
        core = llm.llm_engine.engine_core.engine_core
        found["a"] = engines.greedy(llm)
        core.model_executor.collective_rpc(load, args=(b,))
        found["b"] = engines.greedy(llm)
        found["version"] = engines.weight_version(core)
        llm.reset_prefix_cache()
        found["b afresh"] = engines.greedy(llm)
        found["error"] = updates.error(lambda: llm.collective_rpc(fail_on_first))
        found["ranks"] = llm.collective_rpc(rank)
    return found


def fail_on_first(worker: Any) -> int:
    if worker.rank == 0:
        raise ValueError("on purpose")
    return worker.rank


def parts(a: str, b: str) -> dict[str, Any]:
    """Load into the inner model, then into one layer; last what they have not."""
    found: dict[str, Any] = {}
    weights = dict(models.weights(b))
    inner = {
        name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")
    }
    with engines.open_llm(a) as llm:
        model = engines.inner_model(llm)
        engines.greedy(llm)
        qkv = {name: inner.pop(name) for name in list(inner) if "layers.1.self_attn.q_proj" in name}
        model.model.load_weights(inner.items())
        found["inner"] = updates.refusal(llm)
        found["open"] = model_registry().get(model).state
        model.model.load_weights(qkv.items())
        found["layer"] = updates.refusal(llm)
        model.load_weights(
            [(name, tensor) for name, tensor in weights.items() if not name.startswith("model.")]
        )
        found["b"] = engines.answers(llm)
        found["version"] = engines.weight_version(llm.llm_engine.engine_core.engine_core)
    return found


def zeroed(a: str, b: str) -> dict[str, Any]:
    """Let vLLM set all parameters to zero, as its ``/weight_checker`` does; then a complete update."""
    with engines.open_llm(a, **CACHED) as llm:
        engines.greedy(llm)
        llm.collective_rpc("reset_weights")
        found: dict[str, Any] = dict(refusal=updates.refusal(llm), refusing=ledger.notes()["refusing"])
        engines.inner_model(llm).load_weights(models.weights(b))
        found["b"] = engines.answers(llm)
        found["served"] = ledger.notes()["refusing"]
    return found


def model_registry() -> Any:
    from flashpatch.patches.fp8 import model_registry

    return model_registry


def enabled_after_it(a: str) -> list[str]:
    """What `flashpatch.enable` warns of after an engine in this process was shut down, of which something is left."""
    import flashpatch

    with engines.open_llm(a) as llm:
        engines.greedy(llm, tokens=1)
    found = list(flashpatch.enable("bf16").warnings)
    flashpatch.disable("bf16")
    return found if llm else []


def enabled_late(a: str, b: str, processes: bool) -> dict[str, Any]:
    """Open an engine, then enable; what it says to calls; then one that was opened in time."""
    import warnings

    import flashpatch

    def reload(llm: Any) -> None:
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=b))

    found: dict[str, Any] = {}
    with engines.open_llm(a, processes=processes, fork=True) as llm:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            flashpatch.enable("bf16")
        found["said"] = [str(one.message) for one in caught]
        found["noted"] = ledger.notes()["late"]["fp8"]
        found["update"] = updates.error(lambda: reload(llm))
        found["function"] = updates.error(lambda: llm.collective_rpc(load, args=(b,)))
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        # if it is in this process
        model = core.model_executor.driver_worker.model_runner.model if core else None
        items = list(models.weights(b))
        found["model"] = updates.error(lambda: model.load_weights(items))
        found["harmless"] = updates.error(lambda: llm.collective_rpc("get_supported_tasks"))
        found["a"] = engines.greedy(llm)
        flashpatch.disable()
        found["stock"] = updates.error(lambda: reload(llm))
        found["stock model"] = updates.error(lambda: model.load_weights(items))
    return found


def updated_from_a_thread(a: str, b: str) -> dict[str, Any]:
    """In the middle of a forward another thread begins to load: it waits for the step to end."""
    in_forward, loading = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def weights() -> Iterator[tuple[str, Any]]:
        loading.set()
        yield from models.weights(b)

    def update() -> None:
        in_forward.wait()
        found["update"] = updates.error(lambda: engines.inner_model(llm).load_weights(weights()))

    def pause(*args: Any) -> None:
        if not in_forward.is_set():
            in_forward.set()
            found["loaded meanwhile"] = loading.wait(1.0)

    with opened("bf16", a, options=dict(in_flight="recompute")) as llm:
        thread = threading.Thread(target=update)
        thread.start()
        hook = engines.inner_model(llm).model.layers[1].register_forward_pre_hook(pause)
        engines.add(llm, "1", tokens=12)
        found["request"] = updates.error(lambda: engines.step(llm, 4))
        thread.join()
        hook.remove()
        engines.ended(llm)
        found["b"] = engines.answers(llm)
    return found


def preempted(a: str, b: str) -> dict[str, Any]:
    """Of four requests one is preempted for want of KV memory, a fifth has not begun; then the policy moves."""
    found: dict[str, Any] = {}
    kw = dict(block_size=32, num_gpu_blocks_override=10)
    with opened("bf16", a, options=dict(in_flight="abort"), **kw) as llm:
        core = llm.llm_engine.engine_core.engine_core

        def tokens(requests: Any) -> dict[str, int]:
            return {one.request_id.partition("-")[0]: one.num_output_tokens for one in requests}

        ends: dict[str, Any] = {}
        for number, prompt in enumerate(engines.PROMPTS):
            engines.add(llm, str(number), prompt, 48)
        while not any(one.num_preemptions for one in core.scheduler.requests.values()):
            ends |= engines.step(llm)
        engines.add(llm, "fresh", tokens=48)
        found["waiting"], found["before"] = (
            tokens(core.scheduler.waiting),
            tokens(core.scheduler.requests.values()),
        )
        engines.inner_model(llm).load_weights(models.weights(b))
        ends |= engines.ended(llm)
        found["ended"] = {name: output.outputs[0].finish_reason for name, output in ends.items()}
        found["fresh"] = engines.tokens_of(ends["fresh"])
        found["b"] = engines.greedy(llm, tokens=48)
    return found


# --- the tests


def test_workers_without_flashpatch_are_refused_when_the_engine_opens() -> None:
    error = scenario.run(unarmed_workers, updates.checkpoint("qwen2", 0), env={"FLASHPATCH": "bf16"})
    assert error is not None, "the engine took an update that nobody followed"
    assert "PatchError" in error and "ranks 0, 1" in error and "FLASHPATCH must have the same value" in error


def test_a_call_past_the_engine_core_is_noticed(ab: tuple[str, str]) -> None:
    got = scenario.run(through_the_executor, *ab, env={"FLASHPATCH": "bf16"}, timeout=300)
    assert got["b"] != got["a"]
    assert got["b"] == got["b afresh"], "the prefix cache is of the old policy"
    assert got["version"] == "flashpatch-1"
    assert "rank 0: ValueError: on purpose" in got["error"]
    assert got["ranks"] == [0, 1], "an answer to the call before was read"


def test_a_load_of_parts_is_an_update_of_the_whole(ab: tuple[str, str]) -> None:
    got = scenario.run(parts, *ab, env={"FLASHPATCH": "bf16"})
    assert got["inner"] is not None, "the inner model was loaded into unseen"
    assert "q_proj" in got["inner"] and "lm_head" in got["inner"] and got["open"] == "open"
    assert "q_proj" not in got["layer"] and "lm_head" in got["layer"]
    assert engines.difference(got["b"], oracle.answers(ab[1])).exact
    assert got["version"] == "flashpatch-1"


@pytest.mark.vllm(least="0.32")
def test_weights_set_to_zero_are_no_policy(ab: tuple[str, str]) -> None:
    got = scenario.run(zeroed, *ab, env={"FLASHPATCH": "bf16"})
    assert got["refusal"] is not None, "the engine answers from zeros"
    assert "discarded (reset_weights)" in got["refusal"] and "reset_weights" in got["refusing"]
    assert got["served"] == "", "it would be told as refusing for ever"
    assert engines.difference(got["b"], oracle.answers(ab[1])).exact


@pytest.mark.parametrize(
    "processes", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in-process", "processes"]
)
def test_an_engine_opened_before_enabling_takes_no_update(
    runner: scenario.Runner, ab: tuple[str, str], processes: bool
) -> None:
    got = runner(enabled_late, *ab, processes)
    assert got["noted"] in got["said"] and "take no weight updates" in got["noted"]
    for call in ("update", "function", *([] if processes else ["model"])):
        assert got[call] is not None, "the engine was updated as stock does, without a word"
        assert "PatchError" in got[call] and "opened before" in got[call]
    assert got["harmless"] is None and got["a"] == oracle.answers(ab[0])["tokens"]
    assert all("PatchError" not in str(got[stock]) for stock in ("stock", "stock model"))


@pytest.mark.vllm(least="0.32")  # which parts with the model then
def test_an_engine_that_was_shut_down_is_not_asked(runner: scenario.Runner, ab: tuple[str, str]) -> None:
    assert runner(enabled_after_it, ab[0]) == []


def test_a_load_from_another_thread_waits_for_the_step(runner: scenario.Runner, ab: tuple[str, str]) -> None:
    got = runner(updated_from_a_thread, *ab)
    assert got["request"] is None, "a step saw tensors that are being loaded"
    assert got["update"] is None and not got["loaded meanwhile"]
    assert engines.difference(got["b"], oracle.answers(ab[1])).exact


def test_in_flight_abort_ends_what_waits_with_tokens_of_the_old_policy(
    runner: scenario.Runner, ab: tuple[str, str]
) -> None:
    got = runner(preempted, *ab)
    assert got["waiting"].pop("fresh") == 0 and all(got["waiting"].values()) and got["waiting"]
    assert got["ended"].pop("fresh") == "length" and got["fresh"] == got["b"][0]
    assert set(got["ended"].values()) == {"abort"}, f"an answer has tokens of two policies: {got['ended']}"
    assert got["ended"].keys() | {"fresh"} == got["before"].keys()
