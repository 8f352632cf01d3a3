"""With the prefix cache on, what is cached is of the policy that answers."""

from typing import Any

import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, models, oracle, scenario

pytestmark = pytest.mark.vllm


def prefixes(a: str, b: str) -> dict[str, Any]:
    """With the prefix cache on, greedy tokens before and after; and the weight version at each point."""
    with engines.open_llm(a, enable_prefix_caching=True, block_size=32) as llm:
        core = llm.llm_engine.engine_core.engine_core
        found: dict[str, Any] = dict(versions=[engines.weight_version(core)])
        engines.greedy(llm)
        updates.send(llm, [list(models.weights(b))])
        found["b"] = engines.greedy(llm)
        found["versions"].append(engines.weight_version(core))
        if hasattr(core, "set_weight_version"):
            core.set_weight_version("mine")
        updates.send(llm, [list(models.weights(a))])
        found["a"] = engines.greedy(llm)
        found["versions"].append(engines.weight_version(core))
    return found


def test_cached_prefixes_do_not_outlive_the_weights(bf16: scenario.Runner, ab: tuple[str, str]) -> None:
    """Stock vLLM's stale answers are shown in test_stock."""
    a, b = ab
    got = bf16(prefixes, a, b)
    assert got["b"] == oracle.answers(b)["tokens"] and got["a"] == oracle.answers(a)["tokens"]
    before, updated, own = got["versions"]
    vllm_has_one = version_of("vllm") >= Version("0.27")
    assert (before, updated) == ("default", "flashpatch-1")
    assert own == ("mine" if vllm_has_one else "flashpatch-2")
