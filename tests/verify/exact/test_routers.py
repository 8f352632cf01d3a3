"""A choice of experts that rounding decides is no fault; a router that is another is named, and so are wrong experts.

The engine is the trainer's model in bf16, which may hold other weights or choose otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_faults import FAULTS, plant
from vllm_lab import models

from flashpatch.verify.exact.calls import recorded
from flashpatch.verify.exact.certificate import Certificate
from flashpatch.verify.exact.compare import compare, logits, rounded
from flashpatch.verify.exact.engine import Pass
from flashpatch.verify.exact.routers import decided

pytestmark = pytest.mark.slow

IDS = torch.randint(models.VOCAB, (80,), generator=torch.Generator().manual_seed(0)).tolist()
ROUTERS = {
    "qwen3-moe": "model.layers.1.mlp.gate",
    "gpt-oss": "model.layers.1.mlp.router",
    "granite-moe-hybrid": "model.layers.1.block_sparse_moe.router",
}


def loaded(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def compared(
    path: Path,
    served: Path | torch.nn.Module,
    router: str = "",
    choose: Callable | None = None,
    quantization: str = "",
) -> Certificate:
    """The certificate of ``served``, or of the model at that path in bf16, rounded to eight bits if it is quantized."""
    engine = loaded(served, torch.bfloat16) if isinstance(served, Path) else served
    if choose:
        if type(engine.get_submodule(router)).__name__.endswith("Gating"):
            pytest.skip("this transformers' router of Granite returns tokens by expert")
        engine.get_submodule(router).register_forward_hook(choose)
    with recorded(engine) as calls, rounded(engine, quantization):
        given = logits(engine, IDS)
    return compare(lambda dtype: loaded(path, dtype), IDS, Pass(calls, given, quantization))


def otherwise(within: float) -> tuple[Callable, list[int]]:
    """A hook that lets a router take the best expert that it left in the place of the worst that it took, and what it did so for.

    ``within``: of their logits, which are exchanged."""
    tokens = []

    def choose(_: Any, args: Any, returned: tuple) -> None:
        wide = max((one for one in returned if one.is_floating_point()), key=torch.Tensor.numel)
        (chosen,) = [one for one in returned if not one.is_floating_point()]
        taken = torch.zeros_like(wide, dtype=torch.bool).scatter(1, chosen, True)
        worst, best = wide.masked_fill(~taken, 1e9).argmin(1), wide.masked_fill(taken, -1e9).argmax(1)
        for token, (old, new) in enumerate(zip(worst.tolist(), best.tolist(), strict=True)):
            if wide[token, old] - wide[token, new] <= within:
                tokens.append(token)
                wide[token, [old, new]] = wide[token, [new, old]]
                chosen[token][chosen[token] == old] = new

    return choose, tokens


def _alike(path: Path, router: str, one: int = 0, other: int = 1) -> None:
    """Two experts are as likely as each other."""
    from safetensors.torch import load_file, save_file

    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.startswith(router) and tensor.is_floating_point():
            tensor[other] = tensor[one]
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ROUTERS)
def test_either_of_two_experts_that_are_as_likely_may_be_taken(tmp_path, family: str) -> None:
    path = models.checkpoint(tmp_path, family)
    _alike(path, ROUTERS[family])
    choose, tokens = otherwise(within=0.0)
    found = compared(path, path, ROUTERS[family], choose)
    assert found.agrees and 5 < len(tokens) < len(IDS) / 2, (found.first, tokens)
    block = next(place for place in found.places if place.name == ROUTERS[family].rpartition(".")[0])
    assert block.bound < 0.05  # the bound is of roundings alone


def test_rounding_may_decide_which_is_likelier(tmp_path) -> None:
    path = models.checkpoint(tmp_path, "qwen3-moe", seed=4)  # in which some tokens' experts are so near
    choose, tokens = otherwise(within=2.0**-7)  # bf16's spacing at 1
    found = compared(path, path, ROUTERS["qwen3-moe"], choose)
    assert found.agrees and tokens, found.first


def test_what_the_choice_does_to_the_distributions_is_no_fault(tmp_path) -> None:
    """Four of 80 tokens take another expert, which moves the logits further than all rounding does."""
    path = models.checkpoint(tmp_path, "olmoe", seed=1)
    choose, tokens = otherwise(within=2.0**-5)
    found = compared(path, path, "model.layers.0.mlp.gate", choose)
    assert found.agrees and 0 < len(tokens) < 8 and found.kl > 16 * found.kl_rounding, found.first


@pytest.mark.parametrize("fault", ["router stale", "experts exchanged", "router bias"])
def test_what_is_wrong_with_experts_is_named(tmp_path, fault: str) -> None:
    family, _, _, place = FAULTS[fault]
    source = models.checkpoint(tmp_path, family)
    found = compared(source, plant(source, fault, tmp_path))
    assert found.first is not None and found.first.name == place


def test_a_token_is_decided_if_nothing_left_is_as_likely_as_what_was_taken() -> None:
    given = torch.tensor([[3.0, 1.0, 1.0, 0.0], [3.0, 3.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    chosen = torch.tensor([[0, 2], [0, 1], [3, 0]])
    assert decided(given, (given, torch.ones(3, 2), chosen)).tolist() == [False, True, False]
    assert decided(given, (given,)).all()


def test_experts_that_no_token_reaches_are_named(tmp_path) -> None:
    path = models.checkpoint(tmp_path, "qwen3-moe", num_experts=64)
    found = compared(path, path)
    assert found.agrees and not found.ok, found.first
    assert any(one.startswith("model.layers.0.mlp.gate's experts ") for one in found.not_compared)
    few = compared(*[models.checkpoint(tmp_path, "qwen3-moe")] * 2).not_compared
    assert not any("no token took" in one for one in few)


def _chosen(path: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a router in bf16, and which experts it takes, the likeliest first."""
    engine = loaded(path, torch.bfloat16)
    with recorded(engine) as calls:
        logits(engine, IDS)
    given = next(call.returned for call in calls if call.name == name)
    return given, given.topk(engine.config.num_experts_per_tok).indices


def test_experts_that_only_undecided_tokens_took_are_named(tmp_path) -> None:
    """They are not compared: a kernel may take another in their place."""
    path, name = models.checkpoint(tmp_path, "qwen3-moe", num_experts=64), ROUTERS["qwen3-moe"]
    _, chosen = _chosen(path, name)
    taken = chosen.flatten().tolist()
    last = next(expert for expert in chosen[:, -1].tolist() if taken.count(expert) == 1)
    _alike(path, name, last, next(expert for expert in range(64) if expert not in taken))
    given, chosen = _chosen(path, name)
    clearly = {*chosen[decided(given, (chosen,))].flatten().tolist()}
    assert last not in clearly
    found = compared(path, path)
    assert found.agrees, found.first
    (said,) = [one for one in found.not_compared if one.startswith(f"{name}'s experts ")]
    listed = said.partition("experts ")[2].partition(", which")[0]
    assert listed == ", ".join(str(expert) for expert in range(64) if expert not in clearly)


@pytest.mark.parametrize("quantization", ["", "int8", "fp8"])
@pytest.mark.parametrize("taken_by", [1, 2])
def test_one_expert_of_many_that_is_wrong_is_named(tmp_path, quantization: str, taken_by: int) -> None:
    """It adds little to what the block returns, and that to few tokens."""
    path, name = (
        models.checkpoint(tmp_path, "qwen3-moe", num_experts=64, num_experts_per_tok=8),
        ROUTERS["qwen3-moe"],
    )
    _, chosen = _chosen(path, name)
    taken = chosen.flatten().tolist()
    honest = compared(path, path, quantization=quantization)
    assert honest.agrees, honest.first
    judged = [
        expert
        for expert in {*taken}
        if f" {expert}," not in " ".join(honest.not_compared).replace(" which", "")
    ]
    few = [expert for expert in judged if taken.count(expert) == taken_by]
    assert len(few) >= 3, (few, honest.not_compared)
    block = name.removesuffix(".gate")
    for expert in few[:3]:
        engine = loaded(path, torch.bfloat16)
        with torch.no_grad():
            for weight in engine.get_submodule(f"{block}.experts").parameters():
                weight[expert] = weight[expert].roll(1, 0)
        found = compared(path, engine, quantization=quantization)
        assert found.first is not None and found.first.name == block, expert
        assert found.first.kind in (f"expert {expert}", "")  # which the whole block may show too
