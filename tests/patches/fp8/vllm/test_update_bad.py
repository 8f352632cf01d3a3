"""Bad updates: the engine refuses by name, or keeps the old policy; it never serves a mixture, and it lives on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, models, oracle, scenario

pytestmark = pytest.mark.vllm

FP8 = dict(quantization="fp8_per_channel")
ATTENTION = "model.layers.1.self_attn"
NORM = "model.layers.1.input_layernorm.weight"


# --- bad updates: what reaches the engine when B is sent badly. Each runs in the engine's process.


def replaced(items: list[updates.Named], name: str, change: Callable[[Any], Any]) -> list[updates.Named]:
    return [(key, change(value) if key == name else value) for key, value in items]


def spoiled(value: float) -> Callable[[Any], Any]:
    def change(tensor: Any) -> Any:
        tensor = tensor.clone()
        tensor.view(-1)[7] = value
        return tensor

    return change


def _unknown(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [[*items, (f"{ATTENTION}.nonsense.weight", items[0][1])]])


def _missing_shard(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [[item for item in items if item[0] != f"{ATTENTION}.k_proj.weight"]])
    updates.finish(llm)


def _missing_layer(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [[item for item in items if ".layers.1." not in item[0]]])
    updates.finish(llm)


def _wrong_shape(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [replaced(items, f"{ATTENTION}.v_proj.weight", lambda t: t[:-1])])


def _int_into_float(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [replaced(items, NORM, lambda t: t.int())])


def _nan(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [replaced(items, f"{ATTENTION}.q_proj.weight", spoiled(float("nan")))])


def _inf(llm: Any, items: list[updates.Named]) -> None:
    updates.send(llm, [replaced(items, NORM, spoiled(float("-inf")))])


def _raises(llm: Any, items: list[updates.Named]) -> None:
    engines.inner_model(llm).load_weights(updates.failing(items, len(items) // 2))


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
    "missing layer": (_missing_layer, "model.layers.1."),
    "wrong shape": (_wrong_shape, "v_proj"),
    "int into float": (_int_into_float, "bfloat16 but was given int32"),
    "NaN": (_nan, "qkv_proj.weight holds NaN or Inf"),
    "Inf": (_inf, f"{NORM} holds NaN or Inf"),
    "sender raises": (_raises, "OSError: the sender's connection broke"),
    "reload raises": (_reload_raises, "OSError: the sender's connection broke"),
    "killed sender": (_killed, "did not come"),
}

#: What is no fault before vLLM 0.25: its loaders pass over a name that the model has not. All others came.
PASSED_OVER = {"unknown name"} if version_of("vllm") < Version("0.25") else set()


#: Those of `make test`, where the others are sent to toys (tests/patches/fp8/refit/test_bad_updates.py).
FEW = ("missing shard", "NaN", "killed sender")


def bad_updates(a: str, b: str, kw: dict[str, Any], names: list[str], **options: Any) -> dict[str, Any]:
    """Bad updates on an engine that serves A: their errors, the refusal after each, what is answered after it,
    and what is answered once all of A came again."""
    import flashpatch

    flashpatch.enable("bf16", **options)
    found: dict[str, Any] = {}
    with engines.open_llm(a, **kw) as llm:
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
    flashpatch.disable("bf16")
    return found


def quantized_kinds(a: str, b: str) -> dict[str, Any]:
    """Floats into an int8 parameter of a quantized checkpoint."""
    import torch

    name = "model.layers.0.mlp.down_proj.weight"
    with engines.open_llm(a) as llm:
        items = list(models.weights(b))
        dtype = dict(items)[name].dtype
        error = updates.error(lambda: updates.send(llm, [replaced(items, name, lambda t: t.bfloat16())]))
        refusal = updates.refusal(llm)
        updates.send(llm, [items])
        return dict(stored=str(dtype == torch.int8), error=error, refusal=refusal, b=engines.answers(llm))


def two_at_once(a: str, b: str) -> dict[str, Any]:
    """The second sender comes while the first is half-way."""
    half, go = threading.Event(), threading.Event()
    first: list[str | None] = []

    def slowly() -> Iterator[updates.Named]:
        for index, item in enumerate(models.weights(b)):
            if index == 9:
                half.set()
                assert go.wait(300)
            yield item

    with engines.open_llm(a) as llm:
        load = engines.inner_model(llm).load_weights
        thread = threading.Thread(target=lambda: first.append(updates.error(lambda: load(slowly()))))
        thread.start()
        assert half.wait(300)
        second = updates.error(lambda: load(models.weights(a)))
        go.set()
        thread.join(300)
        return dict(first=first[0], second=second, answers=engines.answers(llm))


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


def in_flight(a: str, b: str, mode: str, **kw: Any) -> dict[str, Any]:
    """An update while a request runs, half of its tokens in: its error, how the request ends, and what follows."""
    from vllm import SamplingParams

    import flashpatch

    flashpatch.enable("bf16", in_flight=mode)
    with engines.open_llm(a, **kw) as llm:
        engine, ends = llm.llm_engine, []
        sampling = SamplingParams(temperature=0, max_tokens=engines.TOKENS, ignore_eos=True, detokenize=False)
        engine.add_request("running", {"prompt_token_ids": list(engines.PROMPTS[0])}, sampling)
        for _ in range(engines.TOKENS // 2):
            assert not [output for output in engine.step() if output.finished]
        error = updates.error(lambda: updates.send(llm, [list(models.weights(b))]))

        def run() -> None:
            while engine.has_unfinished_requests():
                ends.extend(output for output in engine.step() if output.finished)

        problem = updates.error(run)
        tokens = [list(output.outputs[0].token_ids) for output in ends]
        reasons = [output.outputs[0].finish_reason for output in ends]
        after = None if problem else engines.answers(llm)
        updates.send(llm, [list(models.weights(b))])
        found = dict(error=error, problem=problem, tokens=tokens, reasons=reasons, after=after)
        found["b"] = engines.answers(llm)
    flashpatch.disable("bf16")
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


@pytest.fixture(scope="module")
def runner() -> Iterator[scenario.Runner]:
    with scenario.Runner({"FLASHPATCH": "bf16"}) as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def chosen() -> Iterator[scenario.Runner]:
    """For scenarios that call enable() with options of their own."""
    with scenario.Runner() as interpreter:
        yield interpreter


A, B = ("qwen2", 0), ("qwen2", 1)


SENT = [
    pytest.param({}, FEW, id="bf16, some"),
    pytest.param({}, tuple(BAD), marks=pytest.mark.full, id="bf16"),
    pytest.param(FP8, tuple(BAD), marks=pytest.mark.full, id="fp8"),
]


@pytest.mark.parametrize(("kw", "names"), SENT)
def test_by_layer_nothing_is_generated_until_a_complete_update(
    chosen: scenario.Runner, kw: dict[str, Any], names: tuple[str, ...]
) -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    got = chosen(bad_updates, a, b, kw, names)
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
    chosen: scenario.Runner, kw: dict[str, Any], names: tuple[str, ...]
) -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    got = chosen(bad_updates, a, b, kw, names, atomic="model")
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


def test_floats_do_not_go_into_int8(runner: scenario.Runner) -> None:
    a, b = (updates.checkpoint("qwen2", seed, "int8") for seed in (0, 1))
    got = runner(quantized_kinds, a, b)
    assert got["stored"] == "True" and "int8 but was given bfloat16" in got["error"]
    assert "int8" in got["refusal"]
    assert engines.difference(got["b"], oracle.answers(b)).exact


def test_two_updates_at_once(runner: scenario.Runner) -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    got = runner(two_at_once, a, b)
    assert got["first"] is None and "another update is loading" in got["second"]
    assert engines.difference(got["answers"], oracle.answers(b)).exact


def test_partial_updates_are_whole_layers(runner: scenario.Runner) -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    got = runner(partial_updates, a, b)
    assert engines.difference(got["whole"], oracle.answers(updates.mixture(a, (".layers.1.", b)))).exact
    for shard in ("k_proj", "v_proj"):
        assert f"model.layers.0.self_attn.{shard}.weight" in got["cut"]
    assert "self_attn.q_proj" not in got["cut"].partition("\n")[0] and got["refusal"] is not None
    assert engines.difference(got["mended"], oracle.answers(a)).exact
    assert engines.difference(got["ignored"], oracle.answers(b)).exact


def test_what_never_ran_beside_lora_is_refused_by_name(runner: scenario.Runner) -> None:
    got = runner(sharded_lora, updates.checkpoint(*A), updates.checkpoint(*B))
    assert "enable_lora" in got["error"] and "fully_sharded_loras" in got["error"]


@pytest.mark.parametrize(
    "mode", ["refuse", "abort", pytest.param("recompute", marks=pytest.mark.full), "keep"]
)
def test_an_update_while_requests_run(chosen: scenario.Runner, mode: str) -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    old, new = oracle.answers(a), oracle.answers(b)
    got = chosen(in_flight, a, b, mode, timeout=90)
    assert engines.difference(got["b"], new).exact
    assert got["problem"] is None
    if mode == "refuse":
        assert "requests are running" in got["error"] and "in_flight" in got["error"]
        assert got["tokens"] == [old["tokens"][0]]
        assert engines.difference(got["after"], old).exact
        return
    assert got["error"] is None
    assert engines.difference(got["after"], new).exact
    if mode == "abort":
        assert all(reason == "abort" for reason in got["reasons"])
        return
    [tokens] = got["tokens"]
    half = engines.TOKENS // 2
    assert tokens[:half] == old["tokens"][0][:half] and len(tokens) == engines.TOKENS
    assert tokens != old["tokens"][0]


def test_cached_prefixes_do_not_outlive_the_weights(runner: scenario.Runner) -> None:
    """Stock vLLM's stale answers are shown in test_stock."""
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    got = runner(prefixes, a, b)
    assert got["b"] == oracle.answers(b)["tokens"] and got["a"] == oracle.answers(a)["tokens"]
    before, updated, own = got["versions"]
    vllm_has_one = version_of("vllm") >= Version("0.27")
    assert (before, updated) == ("default", "flashpatch-1")
    assert own == ("mine" if vllm_has_one else "flashpatch-2")
