"""LoRA adapters of a running engine: replaced exactly over any base, or refused by name with the old one in place."""

from typing import Any

import lora_lab
import pytest
import vllm_updates as updates
from vllm_lab import engines, oracle, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

A, B = ("qwen2", 0), ("qwen2", 1)
DOWN = "base_model.model.model.layers.1.mlp.down_proj"


# --- what runs in the engine's process


def over_a_base(name: str, a: str, b: str, folders: list[str]) -> dict[str, Any]:
    """Three adapters in turn, the base alone, another base, the last adapter on it."""
    from flashpatch import ledger

    with opened(name, a, **lora_lab.ENGINE) as llm:
        inner = engines.inner_model(llm)
        before, found = engines.addresses(inner), dict(adapters=[])
        for folder in folders:
            lora_lab.send(llm, folder)
            found["adapters"].append(lora_lab.ask(llm, folder))
        found["base"] = engines.answers(llm)
        updates.send(llm, [lora_lab.base(b)])
        updates.finish(llm)
        found["other base"] = engines.answers(llm)
        found["adapter on it"] = lora_lab.ask(llm, folders[-1])
        lora_lab.send(llm, folders[0])
        found["first on it"] = lora_lab.ask(llm, folders[0])
        found["moved"] = sorted(k for k, at in engines.addresses(inner).items() if before.get(k) != at)
        found["notes"] = {
            one: ledger.notes()[one] for one in ("adapter_version", "adapters", "policy_version")
        }
    return found


def bad_adapters(a: str, good: str, where: str) -> dict[str, Any]:
    """Each bad adapter sent over a good one: the error, and what the engine says under it then."""
    found = {}
    with opened("bf16", a, **lora_lab.ENGINE) as llm:
        for how, (spoiled, changed) in spoiled_adapters(a).items():
            lora_lab.send(llm, good)
            folder = lora_lab.write(f"{where}/{how}", spoiled, **changed)
            error = updates.error(lambda folder=folder: lora_lab.send(llm, folder))
            found[how] = dict(error=error, answers=lora_lab.ask(llm, good))
    return found


def spoiled_adapters(a: str) -> dict[str, tuple[lora_lab.Tensors, dict[str, Any]]]:
    """How an adapter is spoiled -> its tensors and what its configuration says otherwise."""
    good = lora_lab.tensors(a, 9)
    first = f"{DOWN}.lora_A.weight"
    elsewhere = {name.replace(".layers.1.", ".layers.7."): tensor for name, tensor in good.items()}
    nan = good[first].clone()
    nan[1, 3] = float("nan")
    return {
        "narrow": ({**good, first: good[first][:, :-8]}, {}),
        "elsewhere": (elsewhere, {}),
        "nan": ({**good, first: nan}, {}),
        "pattern": (good, dict(alpha_pattern={"down_proj": 64})),
    }


#: What the refusal of each names.
NAMED = {
    "narrow": "layers.1.mlp.down_proj: lora_A is",
    "elsewhere": "the engine has no place for model.layers.7",
    "nan": "layers.1.mlp.down_proj: holds NaN",
    "pattern": "alpha_pattern={'down_proj': 64}",
}


def in_flight(a: str, folders: list[str]) -> dict[str, Any]:
    """A replacement while a request runs under the adapter, and one under a number of its own."""
    with opened("bf16", a, **{**lora_lab.ENGINE, "max_loras": 2}) as llm:
        lora_lab.send(llm, folders[0])
        engines.add(llm, "running", lora=lora_lab.request(folders[0]))
        engines.step(llm, 4)
        found: dict[str, Any] = dict(replaced=updates.error(lambda: lora_lab.send(llm, folders[1])))
        beside = dict(name="next", number=2)
        found["beside"] = updates.error(lambda: lora_lab.send(llm, folders[1], **beside))
        found["tokens"] = engines.tokens_of(engines.ended(llm)["running"])
        found["next"] = lora_lab.ask(llm, folders[1], **beside)
    return found


def in_one_batch(a: str, folders: list[str]) -> dict[str, Any]:
    """Greedy tokens of the base and of two adapters, alone and in batches of several."""
    asked = engines.sampling()
    prompt = {"prompt_token_ids": list(engines.PROMPTS[0])}
    with opened("bf16", a, **{**lora_lab.ENGINE, "max_loras": 2}) as llm:
        named = [lora_lab.request(one, name=f"one-{at}", number=at) for at, one in enumerate(folders, 1)]
        under: dict[str, Any] = {"base": None, "first": named[0], "second": named[1]}

        def said(*names: str) -> dict[str, list[int]]:
            rows = [under[name] for name in names]
            outputs = llm.generate([prompt] * len(rows), asked, lora_request=rows, use_tqdm=False)
            return {name: engines.tokens_of(one) for name, one in zip(names, outputs, strict=True)}

        alone = {name: said(name)[name] for name in under}
        return dict(alone=alone, together=[said("base", "first"), said("second", "base"), said(*under)])


# --- the tests


_FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "scheme", "kw"),
    [
        ("bf16", None, {}),
        ("int8", "int8", {}),
        pytest.param("fp8_channel", None, dict(quantization="fp8_per_channel"), marks=_FULL),
        pytest.param("fp8_tensor", None, dict(quantization="fp8_per_tensor"), marks=_FULL),
    ],
    ids=["bf16", "int8", "fp8_channel", "fp8_tensor"],
)
def test_adapters_come_and_go_over_a_base(
    runner: scenario.Runner, name: str, scheme: str | None, kw: dict[str, Any]
) -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    folders = [lora_lab.adapter(a, seed) for seed in (1, 2, 3)]
    got = runner(over_a_base, name, a, b, folders)
    stock_a, stock_b = (updates.checkpoint(*which, scheme) for which in (A, B))
    want = {
        **{f"adapter {at}": lora_lab.fresh(stock_a, folder, **kw) for at, folder in enumerate(folders)},
        "base": lora_lab.fresh(stock_a, **kw),
        "other base": lora_lab.fresh(stock_b, **kw),
        "adapter on it": lora_lab.fresh(stock_b, folders[-1], **kw),
        "first on it": lora_lab.fresh(stock_b, folders[0], **kw),
    }
    got.update({f"adapter {at}": found for at, found in enumerate(got.pop("adapters"))})
    gaps = {key: engines.difference(got[key], fresh) for key, fresh in want.items()}
    assert all(gap.exact for gap in gaps.values()), gaps
    apart = engines.difference(want["adapter 0"], want["adapter 1"])
    assert apart.mean > 0.05  # else exactness would say little
    assert not got["moved"]
    assert got["notes"]["adapter_version"] == 4 and got["notes"]["policy_version"] == 1
    if name == "bf16":
        merged = oracle.answers(lora_lab.merged(a, 1))
        one = engines.difference(got["adapter 0"], merged, forced=True)
        apart = engines.difference(want["adapter 0"], want["adapter 1"], forced=True)
        assert one.mean < apart.mean / 20 and not one.nan, one


def test_a_bad_adapter_is_refused_by_name(runner: scenario.Runner, tmp_path: Any) -> None:
    a = updates.checkpoint(*A)
    good = lora_lab.adapter(a, 1)
    got = runner(bad_adapters, a, good, str(tmp_path / "bad"))
    kept = lora_lab.fresh(a, good)
    for how, named in NAMED.items():
        assert got[how]["error"] is not None and named in got[how]["error"], (how, got[how]["error"])
        assert engines.difference(got[how]["answers"], kept).exact, how


def test_running_requests_keep_their_adapter(runner: scenario.Runner) -> None:
    a = updates.checkpoint(*A)
    folders = [lora_lab.adapter(a, seed) for seed in (1, 2)]
    got = runner(in_flight, a, folders)
    assert "requests are running under the LoRA adapter 1" in got["replaced"] and got["beside"] is None
    assert got["tokens"] == lora_lab.fresh(a, folders[0])["tokens"][0]
    assert engines.difference(got["next"], lora_lab.fresh(a, folders[1])).exact


def test_a_request_of_the_base_beside_adapters_gets_none(runner: scenario.Runner) -> None:
    a = updates.checkpoint(*A)
    got = runner(in_one_batch, a, [lora_lab.adapter(a, seed) for seed in (1, 2)])
    assert len({tuple(tokens) for tokens in got["alone"].values()}) == 3
    for found in got["together"]:
        assert found == {name: got["alone"][name] for name in found}
