"""Two engines of one data-parallel group, their experts across both: what is refused, and that neither waits for ever."""

from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, group, models

pytestmark = pytest.mark.vllm(least="0.32")


def stock(rank: int, model: str) -> dict[str, Any]:
    """Answers of a pair without FlashPatch."""
    with group.open_rank(model) as llm:
        return engines.answers(llm)


def one_updates(rank: int, a: str, b: str) -> dict[str, Any]:
    """One rank alone is sent another policy; both are asked."""
    import flashpatch

    flashpatch.enable("bf16")
    with group.open_rank(a) as llm:
        items = list(models.weights(b))
        said = None if rank else updates.error(lambda: updates.send(llm, [items]))
        return dict(said=said, answers=engines.answers(llm))


def one_discards(rank: int, model: str) -> dict[str, Any]:
    """One rank alone is to discard its weights in each way there is; both are asked."""
    import flashpatch

    flashpatch.enable("bf16")
    with group.open_rank(model) as llm:
        calls = (
            lambda: llm.sleep(level=2),
            lambda: llm.collective_rpc("sleep", args=(2,)),
            lambda: llm.collective_rpc("reset_weights"),
        )
        said = [] if rank else [updates.error(call) for call in calls]
        return dict(said=said, answers=engines.answers(llm))


def one_is_refused(rank: int, model: str) -> dict[str, Any]:
    """One rank alone may not generate; both are asked."""
    import flashpatch
    from flashpatch.patches.fp8 import model_registry

    flashpatch.enable("bf16")

    def ask(prompt: tuple[int, ...]) -> None:
        [done] = llm.generate({"prompt_token_ids": list(prompt)}, engines.sampling(), use_tqdm=False)
        tokens.append(engines.tokens_of(done))

    tokens: list[list[int]] = []
    with group.open_rank(model) as llm:
        if rank == 0:
            model_registry.get(engines.inner_model(llm)).mark_discarded(by="an injected fault")
            llm.collective_rpc("check_health")
        said = [updates.error(lambda prompt=prompt: ask(prompt)) for prompt in engines.PROMPTS]
        return dict(said=said, tokens=tokens)


@pytest.fixture(scope="module")
def pair() -> tuple[str, str]:
    return updates.checkpoint("qwen3-moe", 0), updates.checkpoint("qwen3-moe", 1)


@pytest.fixture(scope="module")
def want(pair: tuple[str, str]) -> list[Any]:
    """What each rank of a pair on the first policy answers."""
    return group.run(stock, pair[0])


def test_an_update_of_one_engine_is_refused_by_name(pair: tuple[str, str], want: list[Any]) -> None:
    got = group.run(one_updates, *pair)
    assert "its experts span the 2 engines of a data-parallel group" in got[0]["said"]
    for rank in range(group.SIZE):
        assert engines.difference(got[rank]["answers"], want[rank]).exact


@pytest.mark.full
def test_what_no_update_could_bring_back_is_not_discarded(pair: tuple[str, str], want: list[Any]) -> None:
    got = group.run(one_discards, pair[0])
    for said in got[0]["said"]:
        assert "discards weights that no update could bring back: its experts span the 2 engines" in said
    for rank in range(group.SIZE):
        assert engines.difference(got[rank]["answers"], want[rank]).exact


def test_an_engine_that_is_refused_keeps_the_other_going(pair: tuple[str, str], want: list[Any]) -> None:
    refused, healthy = group.run(one_is_refused, pair[0])
    assert all("an injected fault" in said for said in refused["said"]) and not refused["tokens"]
    assert healthy == dict(said=[None] * len(engines.PROMPTS), tokens=want[1]["tokens"])
