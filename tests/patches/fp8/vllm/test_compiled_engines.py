"""Forwards that vLLM compiles as by default on a GPU: an update changes the answers, and compiles nothing again."""

from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import compiled, engines, environment, models, oracle, scenario

pytestmark = pytest.mark.vllm

FP8 = {"quantization": "fp8_per_channel"}
CASES = [
    ("qwen2", "fp8", FP8),
    pytest.param("qwen2", "bf16", {}, marks=pytest.mark.full),
    pytest.param("qwen3-moe", "bf16", {}, marks=pytest.mark.full),
]


def opened(first: str, kw: dict[str, Any], *later: str) -> dict[str, Any]:
    """Ask an engine, after its first checkpoint and after each update; what was traced when."""
    start = compiled.traced()
    with compiled.like_a_gpu(), engines.open_llm(first, enforce_eager=False, **kw) as llm:
        mode = llm.llm_engine.vllm_config.compilation_config.mode
        answers, counted = [engines.answers(llm)], [compiled.traced()]
        for source in later:
            updates.send(llm, [list(models.weights(source))])
            answers.append(engines.answers(llm))
            counted.append(compiled.traced())
    new = [{name: count - start.get(name, 0) for name, count in one.items()} for one in counted]
    return {"mode": int(mode), "answers": answers, "traced": new}


@pytest.mark.parametrize(("family", "names", "kw"), CASES)
def test_an_updated_engine_answers_as_a_fresh_one_without_another_trace(
    family: str, names: str, kw: dict[str, Any]
) -> None:
    a, b = (updates.checkpoint(family, seed) for seed in (0, 1))
    got = scenario.run(opened, a, kw, b, a, b, env={"FLASHPATCH": names, **environment.COMPILED})
    with scenario.Runner({**oracle.ENV, **environment.COMPILED}, standin=True) as stock:
        fresh = [stock(opened, source, kw) for source in (a, b)]
    assert got["mode"] == fresh[0]["mode"] == 3, "vLLM compiled in another mode"
    for number, answers in enumerate(got["answers"]):
        gap = engines.difference(answers, fresh[number % 2]["answers"][0])
        assert gap.exact, (number, gap)
    assert got["traced"] == [fresh[0]["traced"][0]] * 4, "traced otherwise than stock, or again"
    assert got["traced"][0]["graph_break"] == 0 and got["traced"][0]["num_graphs_seen"] == 1
