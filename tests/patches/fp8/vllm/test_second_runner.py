"""vLLM's second model runner ("V2", the default on GPUs), on a CPU: it answers as the first, and takes updates."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, environment, models, oracle, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

#: Between logprobs of both runners, which normalize in kernels of their own. Hidden states and tokens are equal.
CLOSE = 4e-6

TOKENS = 4  # per prompt and question: Triton's interpreter takes a tenth of a second for each
CACHED = dict(enable_prefix_caching=True, block_size=32)
CHECK = "fp8.vllm.model_runner_v2_execute_model"


def shuffled(a: str, b: str, name: str, seed: int) -> dict[str, Any]:
    """The class of the runner; then A to B in buckets that cut fused layers, with cached prefixes of A."""
    with opened(name, a, **CACHED) as llm:
        kind, model = type(engines.inner_runner(llm)), engines.inner_model(llm)
        before = engines.addresses(model)
        found: dict[str, Any] = dict(runner=f"{kind.__module__}.{kind.__qualname__}")
        found["old"] = engines.greedy(llm, TOKENS)
        updates.sync(llm, updates.buckets(list(models.weights(b)), random.Random(seed)))
        found["new"], found["answers"] = engines.greedy(llm, TOKENS), engines.answers(llm, TOKENS)
        found["moved"] = [key for key, at in engines.addresses(model).items() if before.get(key) != at]
    return found


def in_flight(a: str, b: str, mode: str) -> dict[str, Any]:
    """An update while a request runs, six tokens in: how the request ends, and B's continuation of those six."""
    with opened("bf16", a, options=dict(in_flight=mode), **CACHED) as llm:
        engines.add(llm, "running", tokens=12)
        assert not engines.step(llm, 6)
        updates.sync(llm, updates.buckets(list(models.weights(b)), random.Random(0)))
        ends = engines.ended(llm).values()
        tokens = [engines.tokens_of(output) for output in ends]
        whole = {"prompt_token_ids": [*engines.PROMPTS[0], *(tokens[0][:6] if tokens else [])]}
        [after] = llm.generate(whole, engines.sampling(12), use_tqdm=False)
        found = dict(tokens=tokens, reasons=[output.outputs[0].finish_reason for output in ends])
        found.update(after=engines.tokens_of(after), b=engines.greedy(llm, TOKENS))
    return found


def incomplete(a: str, b: str) -> dict[str, Any]:
    """Half of B: the gate's refusal, then a scheduled step that is handed to worker and runner past the gate."""
    import flashpatch

    with opened("bf16", a) as llm:
        core = llm.llm_engine.engine_core.engine_core
        runner = engines.inner_runner(llm)
        engines.greedy(llm, tokens=1)
        found: dict[str, Any] = dict(calls=flashpatch.status()[CHECK].calls)
        items = list(models.weights(b))
        updates.send(llm, [items[:5], items[5:11]])
        found["refusal"] = updates.refusal(llm)
        found["refused"] = flashpatch.status()[CHECK].calls
        engines.add(llm, "past", tokens=1)
        step = core.scheduler.schedule()
        found["tokens"] = step.total_num_scheduled_tokens
        found["runner"] = updates.error(lambda: runner.execute_model(step))
        found["state"] = runner.execute_model_state is None
        found["past"] = flashpatch.status()[CHECK].calls
        llm.llm_engine.abort_request(["past"])
        updates.send(llm, [items[11:]])
        found["b"] = engines.greedy(llm, TOKENS)
        status = flashpatch.status()
        found["states"] = {id: status[id].state.word for id in (CHECK, CHECK.replace("_v2", ""))}
    return found


# --- the tests


@pytest.fixture(scope="module")
def runner() -> Iterator[scenario.Runner]:
    with scenario.Runner(environment.V2) as interpreter:
        yield interpreter


def checkpoints() -> tuple[str, str]:
    return updates.checkpoint("qwen2", 0), updates.checkpoint("qwen2", 1)


@pytest.mark.parametrize(
    ("name", "stock"),
    [pytest.param("bf16", {}, marks=pytest.mark.full), ("fp8", dict(quantization="fp8_per_channel"))],
)
def test_an_update_in_shuffled_buckets_equals_a_fresh_engine(
    runner: scenario.Runner, name: str, stock: dict[str, Any]
) -> None:
    a, b = checkpoints()
    seed = updates.seed_of_the_day()
    got = runner(shuffled, a, b, name, seed)
    fresh = oracle.answers(b, env=environment.V2, tokens=TOKENS, **CACHED, **stock)
    assert engines.difference(got["answers"], fresh).exact
    assert got["new"] == fresh["tokens"] != got["old"]
    assert not got["moved"]
    assert got["runner"] == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"


@pytest.mark.full  # both are stock
def test_it_answers_as_the_first_runner() -> None:
    _, b = checkpoints()
    first, second = (oracle.answers(b, env=env, tokens=TOKENS, **CACHED) for env in ({}, environment.V2))
    gap = engines.difference(first, second)
    assert gap.largest < CLOSE and gap.nan == gap.tokens == 0


@pytest.mark.parametrize("mode", [pytest.param("abort", marks=pytest.mark.full), "recompute"])
def test_an_update_while_a_request_runs(runner: scenario.Runner, mode: str) -> None:
    a, b = checkpoints()
    got = runner(in_flight, a, b, mode)
    assert got["b"] == oracle.answers(b, tokens=TOKENS)["tokens"]
    if mode == "abort":
        assert all(reason == "abort" for reason in got["reasons"])
        return
    [tokens] = got["tokens"]
    assert tokens[:TOKENS] == oracle.answers(a, tokens=TOKENS)["tokens"][0]
    assert tokens[6:] == got["after"][:6]


@pytest.mark.full
def test_a_request_that_keeps_its_kv_shares_no_block(runner: scenario.Runner) -> None:
    a, b = checkpoints()
    kept, again = (runner(in_flight, a, b, mode) for mode in ("keep", "recompute"))
    assert kept["b"] == again["b"] and kept["after"] == again["after"]
    assert kept["tokens"][0][:6] == again["tokens"][0][:6] and kept["tokens"] != again["tokens"]


def test_half_an_update_is_refused_by_the_gate_and_by_the_runner(runner: scenario.Runner) -> None:
    a, b = checkpoints()
    got = runner(incomplete, a, b)
    assert "did not come" in got["refusal"] and "complete update" in got["refusal"]
    assert got["calls"] > 0 and got["refused"] == got["calls"], "the gate let a step through"
    assert got["tokens"] > 0 and "the weights are not one whole policy" in got["runner"]
    assert got["state"] and got["past"] == got["refused"] + 1
    assert got["states"][CHECK] == "live" and got["states"][CHECK.replace("_v2", "")] != "live"
    assert got["b"] == oracle.answers(b, tokens=TOKENS)["tokens"]
