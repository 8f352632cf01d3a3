"""What vLLM does by itself when weights are updated in place: the reason for the weight-update patch.

No FlashPatch anywhere. The wrong outcomes are asserted, so that a vLLM which gets one right fails the
test and its message says so: the `remove_when` of the patch has come for that case."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, environment, models, oracle, scenario

pytestmark = [pytest.mark.vllm, pytest.mark.full]

answers_of_stock = functools.partial(oracle.answers, env=oracle.STOCK)

needs_avx512 = pytest.mark.skipif(not environment.avx512(), reason="without it vLLM packs no bf16 weights")


def loaded_again(a: str, b: str) -> list[str | None]:
    """An engine on A, after its own reload of B: what two ways of loading A into its model say."""
    with engines.open_llm(a) as llm:
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=b))
        q_first = sorted(models.weights(a), key=lambda item: "q_proj" not in item[0])  # as trainers send
        return [
            updates.error(lambda items=items: engines.inner_model(llm).load_weights(items))
            for items in (q_first, models.weights(a))
        ]


def reloaded(a: str, b: str) -> dict[str, Any]:
    with engines.open_llm(a) as llm:
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=b))
        return engines.answers(llm)


def in_two_buckets(a: str, b: str) -> dict[str, Any]:
    """An engine on A; `reload_weights` once with the q projections of B, once with all else."""
    with engines.open_llm(a) as llm:
        for q in (True, False):
            bucket = [item for item in models.weights(b) if ("q_proj" in item[0]) is q]
            llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(bucket)))
        return engines.answers(llm)


def prefixes(a: str, b: str) -> dict[str, Any]:
    """Greedy tokens with the prefix cache on: after a reload of B, and again after the cache was reset."""
    with engines.open_llm(a, enable_prefix_caching=True, block_size=32) as llm:  # four blocks a prompt
        engines.greedy(llm)
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=b))
        stale = engines.greedy(llm)
        return dict(stale=stale, reset=llm.reset_prefix_cache(), fresh=engines.greedy(llm))


@pytest.fixture(scope="module")
def stock() -> Iterator[scenario.Runner]:
    with scenario.Runner({"VLLM_PLUGINS": ""}) as interpreter:
        yield interpreter


@needs_avx512
def test_a_second_load_dies(stock: scenario.Runner, ab: tuple[str, str]) -> None:
    for error in stock(loaded_again, *ab):
        assert error is not None, "upstream has been fixed: a model takes a second load_weights"
        assert "has no attribute 'weight_loader'" in error or "Attempted to load weight" in error


@needs_avx512
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-moe"])
@pytest.mark.skipif(version_of("vllm") < Version("0.29"), reason="exact on 0.27.1 and 0.24.0")
def test_a_reload_of_tied_weights_and_of_experts_is_silently_wrong(
    stock: scenario.Runner, family: str
) -> None:
    a, b = (updates.checkpoint(family, seed) for seed in (0, 1))
    gap = engines.difference(stock(reloaded, a, b), answers_of_stock(b))
    assert gap.mean > 0.5 and not gap.nan, f"upstream has been fixed: reload_weights of {family}"


def test_buckets_that_split_a_fused_layer_are_silently_wrong(
    stock: scenario.Runner, ab: tuple[str, str]
) -> None:
    gap = engines.difference(stock(in_two_buckets, *ab), answers_of_stock(ab[1]))
    assert not gap.exact, "upstream has been fixed: q in one bucket, k and v in the next"


def test_cached_prefixes_outlive_the_weights(stock: scenario.Runner, ab: tuple[str, str]) -> None:
    got = stock(prefixes, *ab)
    want = answers_of_stock(ab[1])["tokens"]
    assert got["stale"] != want, "upstream has been fixed: a reload resets the prefix cache"
    assert got["reset"] is True and got["fresh"] == want
