"""A request is answered by the adapter that it names, or ends alone: new paths and names, evicted, overwritten and lost ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lora_lab
import pytest
import vllm_updates as updates
from vllm_lab import engines, environment, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

A = ("qwen2", 0)
PROMPT = [(7 * i + 3) % 256 for i in range(70)]
"""Two blocks of 32 and more, so that the prefix cache has something to say."""


# --- what runs in the engine's process


@contextmanager
def an_engine(a: str, **options: Any) -> Iterator[Any]:
    kw = {**lora_lab.ENGINE, "enable_prefix_caching": True, "block_size": 32}
    with opened("bf16", a, options=options, **kw) as llm:
        yield llm


def request(folder: str, name: str = "policy") -> Any:
    return lora_lab.request(folder, name)


def say(llm: Any, adapter: Any, tokens: int = 8, prompt: list[int] = PROMPT) -> list[Any]:
    """Tokens and their logprobs."""
    sampling = engines.sampling(tokens, logprobs=0)
    one = llm.generate([{"prompt_token_ids": prompt}], sampling, lora_request=adapter, use_tqdm=False)[0]
    logprobs = [next(iter(at.values())).logprob for at in one.outputs[0].logprobs]
    return [engines.tokens_of(one), logprobs]


def clear(llm: Any) -> None:
    llm.llm_engine.engine_core.engine_core.scheduler.reset_prefix_cache()


def there_and_back(a: str, first: tuple[str, str], second: tuple[str, str], in_place: bool) -> dict[str, Any]:
    """Number 1 holds the first adapter, the second, the first again."""
    found: dict[str, Any] = {}
    with an_engine(a) as llm:
        for key, (folder, name) in (("first", first), ("second", second)):
            llm.llm_engine.add_lora(lora_lab.request(folder, name, replace=in_place))
            found[key] = say(llm, request(folder, name))
        found["stale"] = updates.error(lambda: say(llm, request(*first)))
        found["after it"] = say(llm, request(*second))
        llm.llm_engine.add_lora(lora_lab.request(*first, replace=in_place))
        found["back"] = say(llm, request(*first))
    return found


def replaced_in_flight(a: str, folders: list[str], mode: str) -> dict[str, Any]:
    """A request runs under the first adapter while its number gets the second, of another path; then the first comes back."""
    found: dict[str, Any] = {}
    with an_engine(a, in_flight=mode) as llm:
        lora_lab.send(llm, folders[0])
        found["first"] = say(llm, request(folders[0]), 60)
        clear(llm)
        engines.add(llm, "1", PROMPT, 60, lora=request(folders[0]))
        engines.step(llm, 30)
        lora_lab.send(llm, folders[1])
        ended = list(engines.ended(llm).values())
        found["tokens"] = engines.tokens_of(ended[0]) if ended else []
        found["reason"] = ended[0].outputs[0].finish_reason if ended else ""
        lora_lab.send(llm, folders[0])
        found["back"] = say(llm, request(folders[0]), prompt=PROMPT + found["tokens"])
        clear(llm)
        found["wanted"] = say(llm, request(folders[0]), prompt=PROMPT + found["tokens"])
    return found


def ended_alone(a: str, folders: list[str], where: str) -> dict[str, Any]:
    """Requests in one batch: of the base, of an adapter, of one whose folder has changed, and of one with NaN."""
    changed = lora_lab.write(f"{where}/changed", lora_lab.tensors(a, 1))
    bad = lora_lab.tensors(a, 2)
    next(iter(bad.values()))[0, 0] = float("nan")
    nan = lora_lab.write(f"{where}/nan", bad)
    with opened("bf16", a, **lora_lab.ENGINE) as llm:
        engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
        engine.add_lora(lora_lab.request(changed, "changed", 1))
        engine.add_lora(lora_lab.request(folders[0], "good", 2))  # in the only place
        say(llm, lora_lab.request(folders[0], "good", 2))
        lora_lab.write(changed, lora_lab.tensors(a, 9))
        named = dict(
            good=lora_lab.request(folders[0], "good", 2),
            changed=lora_lab.request(changed, "changed", 1),
            nan=lora_lab.request(nan, "nan", 3),
            nowhere=lora_lab.request(f"{where}/nowhere", "nowhere", 4),
            other=lora_lab.request(folders[0], "other", 2),
        )
        for key, adapter in named.items():
            engines.add(llm, key, PROMPT, lora=adapter)
        found: dict[str, Any] = {key: [[], None, None] for key in named}
        while core.scheduler.has_unfinished_requests():
            for outputs in core.step()[0].values():
                for one in outputs.outputs:
                    key = found[one.request_id.partition("-")[0]]
                    key[0] += one.new_token_ids
                    key[1:] = [str(one.finish_reason), one.stop_reason]
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        found["then"] = say(llm, named["good"])[0]
    return found


def evicted_and_needed(a: str, folders: list[str], where: str) -> dict[str, Any]:
    """More adapters are asked for than vLLM keeps, and each folder is overwritten once its request is in the engine."""
    found: dict[str, Any] = {}
    with opened("bf16", a, **lora_lab.ENGINE) as llm:
        for number in (1, 2, 3):
            folder = lora_lab.write(f"{where}/{number}", lora_lab.tensors(a, number))
            engines.add(llm, str(number), PROMPT, lora=lora_lab.request(folder, str(number), number))
        engines.step(llm)
        for number in (1, 2, 3):
            lora_lab.write(f"{where}/{number}", lora_lab.tensors(a, 9))
        found |= {name: engines.tokens_of(one) for name, one in engines.ended(llm).items()}
        from flashpatch.patches.fp8.vllm_lora import worker_manager

        for seed in (1, 2):  # what nobody names is not kept
            say(llm, lora_lab.request(folders[seed - 1], f"later {seed}", 3 + seed))
        found["kept"] = sorted(worker_manager.of(engines.inner_runner(llm)).models)
    return found


def slept(a: str, folders: list[str], level: int) -> list[Any]:
    """What is said under an adapter before the engine sleeps and after, twice; an adapter is sent while it sleeps."""
    found: list[Any] = []
    with opened("bf16", a, **lora_lab.ENGINE, **environment.SLEEPING) as llm:
        lora_lab.send(llm, folders[0])
        found.append((say(llm, request(folders[0])), say(llm, None)))
        for _ in range(2):
            llm.sleep(level=level)
            error = updates.error(lambda: lora_lab.send(llm, folders[1]))
            llm.wake_up()
            if level == 2:
                updates.send(llm, [lora_lab.base(a)])
                updates.finish(llm)
            found.append((say(llm, request(folders[0])), say(llm, None), error))
    return found


# --- the tests


@pytest.fixture(scope="module")
def a() -> str:
    return updates.checkpoint(*A)


def two_numbers(a: str, where: str) -> dict[str, Any]:
    """One name and folder under two numbers, the folder overwritten in between."""
    kw = {**lora_lab.ENGINE, "max_loras": 2, "enable_prefix_caching": True, "block_size": 32}
    with opened("bf16", a, **kw) as llm:
        first = lora_lab.request(lora_lab.write(where, lora_lab.tensors(a, 1)), "policy", 1)
        llm.llm_engine.add_lora(first)
        found: dict[str, Any] = {"first": say(llm, first)}
        second = lora_lab.request(lora_lab.write(where, lora_lab.tensors(a, 2)), "policy", 2)
        llm.llm_engine.add_lora(second)
        found["second"] = say(llm, second)
        clear(llm)
        found["stale"] = updates.error(lambda: say(llm, first))
        found["after it"] = say(llm, second)
    return found


@pytest.fixture(scope="module")
def folders(a: str) -> list[str]:
    return [lora_lab.adapter(a, seed) for seed in (1, 2)]


@pytest.mark.parametrize(
    ("names", "in_place"),
    [
        (("policy", "policy"), True),
        (("one", "two"), False),
        pytest.param(("policy", "policy"), False, marks=pytest.mark.full),
        pytest.param(("one", "two"), True, marks=pytest.mark.full),
    ],
    ids=["path in place", "name plain", "path plain", "name in place"],
)
def test_a_number_answers_as_what_was_sent_last(
    runner: scenario.Runner, a: str, folders: list[str], names: tuple[str, str], in_place: bool
) -> None:
    got = runner(there_and_back, a, *zip(folders, names), in_place)
    assert got["first"] != got["second"] == got["after it"]
    assert "number 1 of the LoRA adapters holds" in (got["stale"] or "no error"), got["stale"]
    assert got["back"] == got["first"]


def test_caches_know_one_name_by_one_content(runner: scenario.Runner, a: str, tmp_path: Path) -> None:
    got = runner(two_numbers, a, str(tmp_path))
    assert "another number brought it anew" in (got["stale"] or "no error"), got["stale"]
    assert got["first"] != got["second"] == got["after it"]


@pytest.mark.parametrize("mode", ["recompute", pytest.param("abort", marks=pytest.mark.full), "keep"])
def test_a_request_that_runs_follows_the_option(
    runner: scenario.Runner, a: str, folders: list[str], mode: str
) -> None:
    got = runner(replaced_in_flight, a, folders, mode)
    whole = got["first"][0]
    assert got["back"] == got["wanted"]
    if mode == "abort":
        assert got["reason"] == "abort" and got["tokens"] == whole[: len(got["tokens"])]
    else:
        assert len(got["tokens"]) == 60 and got["tokens"] != whole and got["tokens"][:25] == whole[:25]


def test_a_request_without_its_adapter_ends_alone(
    runner: scenario.Runner, a: str, folders: list[str], tmp_path: Path
) -> None:
    got = runner(ended_alone, a, folders, str(tmp_path))
    assert len(got["good"][0]) == 8 and got["good"][0] == got["then"], got["good"]
    wanted = dict(changed="has changed", nan="NaN", nowhere="nowhere", other="holds 'good'")
    for key, reason in wanted.items():
        assert got[key][:2] == [[], "error"] and reason in got[key][2], got[key]


def test_an_adapter_stays_as_long_as_a_request_names_it(
    runner: scenario.Runner, a: str, folders: list[str], tmp_path: Path
) -> None:
    got = runner(evicted_and_needed, a, folders, str(tmp_path))
    assert len({tuple(got[str(number)]) for number in (1, 2, 3)}) == 3
    assert got["kept"] == [5]


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_adapter_is_whole_after_a_sleep(runner: scenario.Runner, a: str, folders: list[str], level: int):
    before, *after = runner(slept, a, folders, level)
    for adapter, base, error in after:
        assert [adapter, base] == before
        assert "the engine sleeps" in (error or "no error")
