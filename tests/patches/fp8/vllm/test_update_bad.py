"""Bad updates: the engine refuses by name, or keeps the old policy; it never serves a mixture, and it lives on."""

from collections.abc import Callable
from typing import Any

import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, models, oracle, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

FP8 = dict(quantization="fp8_per_channel")
ATTENTION = "model.layers.1.self_attn"


# --- bad updates: what reaches the engine when B is sent badly. Each runs in the engine's process.


def replaced(items: list[updates.Named], name: str, change: Callable[[Any], Any]) -> list[updates.Named]:
    return [(key, change(value) if key == name else value) for key, value in items]


def _unknown(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [[*items, (f"{ATTENTION}.nonsense.weight", items[0][1])]])


def _missing_shard(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [[item for item in items if item[0] != f"{ATTENTION}.k_proj.weight"]])
    updates.finish(llm)


def _nan(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [replaced(items, f"{ATTENTION}.q_proj.weight", lambda t: t * float("nan"))])


def _reload_raises(llm: Any, items: list[updates.Named]) -> None:
    weights = updates.failing(items, len(items) // 2)
    llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights))


def _killed(llm: Any, items: list[updates.Named]) -> None:
    """Half the buckets, then silence: nothing raises before the next request."""
    updates.send(llm, [items[:5], items[5:11]])


#: how -> (what its error, or the refusal of the next request, must name)
BAD: dict[str, tuple[Callable[[Any, list[updates.Named]], None], str]] = {
    "unknown name": (_unknown, "nonsense"),
    "missing shard": (_missing_shard, f"{ATTENTION}.k_proj.weight"),
    "NaN": (_nan, "qkv_proj.weight holds NaN or Inf"),
    "reload raises": (_reload_raises, "OSError: the sender's connection broke"),
    "killed sender": (_killed, "did not come"),
}

#: What is no fault before vLLM 0.25: its loaders pass over a name that the model has not. All others came.
PASSED_OVER = {"unknown name"} if version_of("vllm") < Version("0.25") else set()


#: Those of `make test`; more kinds are sent to toys (tests/patches/fp8/refit/test_bad_updates.py).
FEW = ("missing shard", "NaN", "killed sender")


def bad_updates(a: str, b: str, kw: dict[str, Any], names: list[str], **options: Any) -> dict[str, Any]:
    """Bad updates on an engine that serves A: their errors, the refusal after each, what is answered after it,
    and what is answered once all of A came again."""
    found: dict[str, Any] = {}
    with opened("bf16", a, options=options, **kw) as llm:
        for how in names:
            bad, _ = BAD[how]
            error = updates.error(lambda: bad(llm, list(models.weights(b))))
            refusal = updates.refusal(llm)
            found[how] = dict(error=error, refusal=refusal, again=updates.refusal(llm))
            found[how]["kept"] = None if refusal else engines.answers(llm)
            updates.send(llm, [list(models.weights(a))])
            if bad is _killed and kw:
                # This update ends with the next request, which is then computed again: its later tokens in one product
                # with the prompt's, and CPUs with bf16 products round an fp8 product of more than four rows otherwise.
                engines.greedy(llm)
            found[how]["mended"] = engines.answers(llm)
        updates.send(llm, [list(models.weights(b))])
        found["b"] = engines.answers(llm)
    return found


def partial_updates(a: str, b: str) -> dict[str, Any]:
    """Whole layers of B; then a cut fused layer; then A again; then an extra name that models ignore."""
    import torch

    def layer(part: str) -> list[updates.Named]:
        return [item for item in models.weights(b) if part in item[0]]

    found: dict[str, Any] = {}
    with engines.open_llm(a) as llm:
        model = engines.inner_model(llm)
        model.load_weights(layer(".layers.1."), partial=True)
        found["whole"] = engines.answers(llm)
        found["cut"] = updates.error(lambda: model.load_weights(layer(".0.self_attn.q_proj."), partial=True))
        found["refusal"] = updates.refusal(llm)
        updates.send(llm, [list(models.weights(a))])
        found["mended"] = engines.answers(llm)
        ignored = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(32))
        updates.send(llm, [[*models.weights(b), ignored]])
        found["ignored"] = engines.answers(llm)
    return found


def sharded_lora(a: str, b: str) -> dict[str, Any]:
    kw = dict(enable_lora=True, max_loras=1, max_lora_rank=8, fully_sharded_loras=True)
    with engines.open_llm(a, **kw) as llm:
        return dict(error=updates.error(lambda: updates.send(llm, [list(models.weights(b))])))


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


SENT = [
    pytest.param({}, FEW, id="bf16, some"),
    pytest.param({}, tuple(BAD), marks=pytest.mark.full, id="bf16"),
    pytest.param(FP8, tuple(BAD), marks=pytest.mark.full, id="fp8"),
]


@pytest.mark.parametrize(("kw", "names"), SENT)
def test_by_layer_nothing_is_generated_until_a_complete_update(
    runner: scenario.Runner, ab: tuple[str, str], kw: dict[str, Any], names: tuple[str, ...]
) -> None:
    a, b = ab
    got = runner(bad_updates, a, b, kw, names)
    for how in names:
        found, named = got[how], BAD[how][1]
        assert engines.difference(found["mended"], oracle.answers(a, **kw)).exact, how
        if how in PASSED_OVER:
            assert found["error"] is found["refusal"] is None
            assert engines.difference(found["kept"], oracle.answers(b, **kw)).exact
            continue
        assert named in (found["error"] or found["refusal"] or ""), how
        assert found["refusal"] is not None, f"{how}: it generates on a broken policy"
        assert "PatchError" in found["refusal"] and "complete update" in found["refusal"], how
        assert found["again"] is not None, f"{how}: the second request was served"
    assert engines.difference(got["b"], oracle.answers(b, **kw)).exact


@pytest.mark.parametrize(("kw", "names"), SENT)
def test_by_model_the_old_policy_stays(
    runner: scenario.Runner, ab: tuple[str, str], kw: dict[str, Any], names: tuple[str, ...]
) -> None:
    a, b = ab
    got = runner(bad_updates, a, b, kw, names, atomic="model")
    for how in names:
        found, named = got[how], BAD[how][1]
        if how in PASSED_OVER:
            assert found["error"] is None
        elif how != "killed sender":
            assert named in found["error"], how
        assert found["refusal"] is None, how
        kept = b if how in PASSED_OVER else a
        assert engines.difference(found["kept"], oracle.answers(kept, **kw)).exact, how
        assert engines.difference(found["mended"], oracle.answers(a, **kw)).exact, how
    assert engines.difference(got["b"], oracle.answers(b, **kw)).exact


def test_partial_updates_are_whole_layers(bf16: scenario.Runner, ab: tuple[str, str]) -> None:
    a, b = ab
    got = bf16(partial_updates, a, b)
    assert engines.difference(got["whole"], oracle.answers(updates.mixture(a, (".layers.1.", b)))).exact
    for shard in ("k_proj", "v_proj"):
        assert f"model.layers.0.self_attn.{shard}.weight" in got["cut"]
    assert "self_attn.q_proj" not in got["cut"].partition("\n")[0] and got["refusal"] is not None
    assert engines.difference(got["mended"], oracle.answers(a)).exact
    assert engines.difference(got["ignored"], oracle.answers(b)).exact


def test_what_never_ran_beside_lora_is_refused_by_name(bf16: scenario.Runner, ab: tuple[str, str]) -> None:
    got = bf16(sharded_lora, *ab)
    assert "enable_lora" in got["error"] and "fully_sharded_loras" in got["error"]


def test_cached_prefixes_do_not_outlive_the_weights(bf16: scenario.Runner, ab: tuple[str, str]) -> None:
    """Stock vLLM's stale answers are shown in test_stock."""
    a, b = ab
    got = bf16(prefixes, a, b)
    assert got["b"] == oracle.answers(b)["tokens"] and got["a"] == oracle.answers(a)["tokens"]
    before, updated, own = got["versions"]
    vllm_has_one = version_of("vllm") >= Version("0.27")
    assert (before, updated) == ("default", "flashpatch-1")
    assert own == ("mine" if vllm_has_one else "flashpatch-2")
