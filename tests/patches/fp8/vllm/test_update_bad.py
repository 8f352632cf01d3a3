"""Bad updates: the engine refuses by name, or keeps the old policy; it never serves a mixture, and it lives on.

More kinds of them are sent to toys (tests/patches/fp8/update/test_bad_updates.py)."""

from collections.abc import Callable
from typing import Any

import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, models, oracle, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

ATTENTION = "model.layers.1.self_attn"


# --- bad updates: what reaches the engine when B is sent badly. Each runs in the engine's process.


def _missing_shard(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [[item for item in items if item[0] != f"{ATTENTION}.k_proj.weight"]])
    updates.finish(llm)


def _reload_raises(llm: Any, items: list[updates.Named]) -> None:
    weights = updates.failing(items, len(items) // 2)
    llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))


def _killed(llm: Any, items: list[updates.Named]) -> None:
    """Half the buckets, then silence: nothing raises before the next request."""
    updates.send(llm, [items[:5], items[5:11]])


#: how -> (what its error, or the refusal of the next request, must name)
BAD: dict[str, tuple[Callable[[Any, list[updates.Named]], None], str]] = {
    "missing shard": (_missing_shard, f"{ATTENTION}.k_proj.weight"),
    "reload raises": (_reload_raises, "OSError: the sender's connection broke"),
    "killed sender": (_killed, "did not come"),
}


def bad_updates(a: str, b: str, **options: Any) -> dict[str, Any]:
    """Bad updates on an engine that serves A: their errors, the refusal after each, what is answered after it,
    and what is answered once all of A came again."""
    found: dict[str, Any] = {}
    with opened("bf16", a, options=options) as llm:
        for how, (bad, _) in BAD.items():
            error = updates.error(lambda: bad(llm, list(models.weights(b))))
            refusal = updates.refusal(llm)
            found[how] = dict(error=error, refusal=refusal, again=updates.refusal(llm))
            found[how]["kept"] = None if refusal else engines.answers(llm)
            updates.send(llm, [list(models.weights(a))])
            found[how]["mended"] = engines.answers(llm)
        updates.send(llm, [list(models.weights(b))])
        found["b"] = engines.answers(llm)
    return found


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


# --- the tests


@pytest.mark.parametrize("atomic", ["layer", pytest.param("model", marks=pytest.mark.full)])
def test_nothing_is_generated_until_a_complete_update_or_the_old_policy_stays(
    runner: scenario.Runner, ab: tuple[str, str], atomic: str
) -> None:
    a, b = ab
    got = runner(bad_updates, a, b, atomic=atomic)
    for how, (_, named) in BAD.items():
        found = got[how]
        assert engines.difference(found["mended"], oracle.answers(a)).exact, how
        if atomic == "model":
            assert how == "killed sender" or named in found["error"], how
            assert found["refusal"] is None and engines.difference(found["kept"], oracle.answers(a)).exact, (
                how
            )
            continue
        assert named in (found["error"] or found["refusal"] or ""), how
        assert found["refusal"] is not None, f"{how}: it generates on a broken policy"
        assert "PatchError" in found["refusal"] and "complete update" in found["refusal"], how
        assert found["again"] is not None, f"{how}: the second request was served"
    assert engines.difference(got["b"], oracle.answers(b)).exact


def test_cached_prefixes_do_not_outlive_the_weights(bf16: scenario.Runner, ab: tuple[str, str]) -> None:
    """Stock vLLM's stale answers are shown in test_stock."""
    a, b = ab
    got = bf16(prefixes, a, b)
    assert got["b"] == oracle.answers(b)["tokens"] and got["a"] == oracle.answers(a)["tokens"]
    before, updated, own = got["versions"]
    vllm_has_one = version_of("vllm") >= Version("0.27")
    assert (before, updated) == ("default", "flashpatch-1")
    assert own == ("mine" if vllm_has_one else "flashpatch-2")
