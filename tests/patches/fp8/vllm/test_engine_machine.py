"""Any sequence of updates, faults, sleeps and requests on real engines: one committed policy answers, or none."""

from collections.abc import Iterator
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import oracle, scenario

pytest.importorskip("hypothesis")
pytestmark = pytest.mark.vllm

CACHED = dict(enable_prefix_caching=True, block_size=32)
ENGINES = {
    "layer": dict(atomic="layer", partial=False, in_flight="recompute"),
    "model": dict(atomic="model", partial=False, in_flight="abort"),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[scenario.Runner]:
    with scenario.Runner() as interpreter:
        yield interpreter


def explored(runner: scenario.Runner, options: dict[str, Any], sequences: int, steps: int, seed: int | None):
    """Counts of what was seen; the answers of fresh engines come from processes of their own."""
    import vllm_machine
    from vllm_machine_engine import LAYER, TOKENS

    paths = [updates.checkpoint("qwen2", seed) for seed in (0, 1)]
    known = {}
    for rest in (0, 1):
        for last in (0, 1):
            path = paths[rest] if rest == last else updates.mixture(paths[rest], (LAYER, paths[last]))
            tokens = oracle.answers(path)["tokens"][:2]
            known[f"{rest}-{last}"] = [answer[:TOKENS] for answer in tokens]
    assert len({str(answer) for answer in known.values()}) == len(known)
    return runner(vllm_machine.explore, paths, known, options, sequences, steps, seed, timeout=1500, **CACHED)


@pytest.mark.parametrize("atomic", ["layer", pytest.param("model", marks=pytest.mark.full)])
def test_short_sequences(runner: scenario.Runner, atomic: str) -> None:
    found = explored(runner, ENGINES[atomic], sequences=12, steps=12, seed=None)
    assert found["sequences"] >= 12
    assert found["counts"]["answered"] and found["counts"]["failed calls"]


@pytest.mark.full
@pytest.mark.parametrize("in_flight", ["recompute", "abort"])
@pytest.mark.parametrize("atomic", ENGINES)
def test_long_sequences(runner: scenario.Runner, atomic: str, in_flight: str) -> None:
    seed = updates.seed_of_the_day()
    print(f"FLASHPATCH_LAB_SEED={seed}")
    found = explored(runner, ENGINES[atomic] | dict(in_flight=in_flight), sequences=150, steps=30, seed=seed)
    print(found)
    assert found["counts"]["answered"] and found["counts"]["failed calls"]
