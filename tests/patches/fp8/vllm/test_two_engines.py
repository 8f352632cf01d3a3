"""Two engines in one process: neither's requests nor its broken policy concern the other."""

from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, oracle, scenario

pytestmark = pytest.mark.vllm


def beside(a: str, b: str) -> dict[str, Any]:
    """Update one while a request runs on the other; break one, ask the other; update both."""
    import flashpatch

    flashpatch.enable("bf16")
    items = {path: list(models.weights(path)) for path in (a, b)}
    found: dict[str, Any] = {}
    with engines.open_llm(a) as one, engines.open_llm(a) as other:
        engines.add(one, "900000", tokens=16)
        engines.step(one, 3)
        found["own"] = updates.error(lambda: updates.send(one, [items[b]]))
        found["others"] = updates.error(lambda: updates.send(other, [items[b]]))
        found["b"] = engines.answers(other)
        engines.ended(one)
        found["a"] = engines.answers(one)
        updates.send(other, [items[a][:5]])
        found["refusals"] = [updates.refusal(llm) for llm in (one, other)]
        updates.send(other, [items[a]])
        updates.send(one, [items[b]])
        found["swapped"] = [engines.answers(llm) for llm in (one, other)]
    return found


def test_two_engines_of_one_process_are_apart() -> None:
    a, b = (updates.checkpoint("qwen2", seed) for seed in (0, 1))
    want = {"a": oracle.answers(a), "b": oracle.answers(b)}
    got = scenario.run(beside, a, b)
    assert "requests are running" in got["own"]
    assert got["others"] is None, "the other engine's update was refused"
    assert engines.difference(got["a"], want["a"]).exact
    assert engines.difference(got["b"], want["b"]).exact
    assert got["refusals"][0] is None, "an engine with a whole policy was refused"
    assert "did not come" in got["refusals"][1]
    for answers, name in zip(got["swapped"], "ba", strict=True):
        assert engines.difference(answers, want[name]).exact
