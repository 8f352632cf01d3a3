"""int8 on mixtures of experts: rounded on load wherever the engine has a kernel, refused by name where it has none.

vLLM's kernel runs where the CPU can, selected by the laboratory where vLLM would only select it with AMX; on every
CPU a kernel of the laboratory stands in its place (`vllm_lab.int8_experts`). The oracle is stock vLLM with the same
kernel, on a compressed-tensors checkpoint of the same values."""

import random
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, int8_experts, models, oracle, scenario
from vllm_precisions import check, opened, refusal, there_and_back, two_ranks

pytestmark = pytest.mark.vllm(least="0.31")  # before, vLLM's experts are called otherwise

_FULL = pytest.mark.full
_KERNELS = {"vllm": "CPUExpertsInt8", "torch": "TorchExpertsInt8"}
_VLLM = pytest.param(
    "vllm",
    marks=pytest.mark.skipif(
        "vllm" not in int8_experts.kinds(), reason="vLLM's operators need AVX-512 with VNNI and bf16"
    ),
)


def fresh(kind: str, family: str, seed: int, **kw: Any) -> dict[str, Any]:
    """What stock vLLM with these kernels answers on the int8 checkpoint."""
    return oracle.answers(updates.checkpoint(family, seed, "int8"), env=int8_experts.env(kind), **kw)


def updated(kind: str, model: str, sources: list[str], seed: int) -> dict[str, Any]:
    with int8_experts.used(kind):
        return there_and_back("int8", model, sources, seed)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param("mixtral", *_VLLM.values, marks=_VLLM.marks),
        pytest.param("mixtral", "torch", marks=_FULL),
        pytest.param("qwen3-moe", *_VLLM.values, marks=(*_VLLM.marks, _FULL)),
        ("glm4-moe", "torch"),  # with shared experts and a dense layer
    ],
)
def test_experts_are_rounded_on_load_and_by_updates(runner: scenario.Runner, family: str, kind: str) -> None:
    a, b = (updates.checkpoint(family, seed) for seed in (0, 1))
    seed = updates.seed_of_the_day()
    found = runner(updated, kind, a, [b, a, b], seed)
    want = [fresh(kind, family, seed) for seed in (0, 1)]
    assert engines.difference(*want).mean > 0.01
    check(found, [want[i % 2] for i in range(4)])
    layers = {"glm4-moe": 1}.get(family, 2)  # of two, one is dense
    assert found["kernels"][f"CompressedTensorsW8A8Int8MoEMethod/{_KERNELS[kind]}"] == layers


def fused(source: str) -> list[tuple[str, Any]]:
    """The same weights as a trainer holds them: all experts of a layer in one tensor, gate above up."""
    import torch

    items, experts = [], {}
    for name, tensor in models.weights(source):
        base, found, rest = name.partition(".experts.")
        if not found:
            items.append((name, tensor))
            continue
        number, part, _ = rest.split(".")
        experts.setdefault(base, {}).setdefault(part, {})[int(number)] = tensor
    for base, parts in experts.items():
        gate, up, down = (
            torch.stack([parts[part][number] for number in sorted(parts[part])])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        items += [
            (f"{base}.experts.gate_up_proj", torch.cat([gate, up], 1)),
            (f"{base}.experts.down_proj", down),
        ]
    return items


def sent_fused(a: str, b: str) -> dict[str, Any]:
    with int8_experts.used("torch"), opened("int8", a, load_format="dummy") as llm:
        updates.sync(llm, updates.buckets(fused(b), random.Random(1)))
        updates.finish(llm)
        return engines.answers(llm)


def test_experts_come_in_one_tensor_onto_dummy_weights(runner: scenario.Runner) -> None:
    """As verl opens engines, and as transformers keeps experts."""
    a, b = (updates.checkpoint("qwen3-moe", seed) for seed in (0, 1))
    assert engines.difference(runner(sent_fused, a, b), fresh("torch", "qwen3-moe", 1)).exact


def bad_experts(a: str, b: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {}
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    with int8_experts.used("torch"), opened("int8", a) as llm:
        items = list(models.weights(b))
        spoilt = [(n, torch.full_like(t, torch.nan) if n == name else t) for n, t in items]
        found["nan"] = updates.error(lambda: updates.send(llm, [spoilt]))
        found["refused"] = updates.refusal(llm)
        part = [(n, t) for n, t in items if n != name]
        found["missing"] = updates.error(lambda: (updates.send(llm, [part]), updates.finish(llm)))
        updates.send(llm, [items])
        found["answers"] = engines.answers(llm)
    return dict(found, name=name)


def test_a_bad_expert_is_named_and_a_complete_update_mends(runner: scenario.Runner) -> None:
    found = runner(bad_experts, *(updates.checkpoint("mixtral", seed) for seed in (0, 1)))
    assert "w13_weight[w3][2] holds NaN or Inf" in found["nan"] and found["name"] in found["nan"]
    assert "did not come" in found["missing"] and found["name"] in found["missing"]
    assert found["refused"] is not None
    assert engines.difference(found["answers"], fresh("torch", "mixtral", 1)).exact


@_FULL
def test_experts_on_two_ranks(runner: scenario.Runner) -> None:
    a, b = (updates.checkpoint("mixtral", seed) for seed in (0, 1))
    env = {**int8_experts.env("torch"), "FLASHPATCH": "int8"}
    got = scenario.run(two_ranks, a, b, env=env, standin=True)
    for seed, answers in enumerate(got):
        assert engines.difference(answers, fresh("torch", "mixtral", seed, tensor_parallel_size=2)).exact


def refusal_without_kernels(model: str, name: str) -> dict[str, Any]:
    """As on a CPU without kernels for experts in 8 bits; what was loaded before the refusal, and whether the advice helps."""
    import torch
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loaded: list[str] = []
    original = DefaultModelLoader.load_weights
    own = torch.cpu._is_amx_tile_supported
    torch.cpu._is_amx_tile_supported = lambda: False
    DefaultModelLoader.load_weights = lambda self, *args: (loaded.append("weights"), original(self, *args))[1]
    try:
        return dict(error=refusal(name, model), loaded=loaded.copy(), advised=refusal("bf16", model))
    finally:
        torch.cpu._is_amx_tile_supported, DefaultModelLoader.load_weights = own, original


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "int8"),
        *(
            pytest.param(*one, marks=_FULL)
            for one in (("mixtral", "fp8"), ("qwen3-moe", "int8"), ("qwen3-moe", "fp8"))
        ),
    ],
)
def test_where_no_kernel_is_experts_are_refused_before_anything_loads(
    runner: scenario.Runner, family: str, name: str
) -> None:
    found = runner(refusal_without_kernels, updates.checkpoint(family, 0), name)
    assert f"no kernel here for experts in {name}" in found["error"] and "Use bf16" in found["error"]
    assert "fp8.vllm.initialize_model" in found["error"] and found["loaded"] == []
    assert found["advised"] is None
