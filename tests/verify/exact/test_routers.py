"""A choice of experts that rounding decides is no fault; a router that is another is named, and so are wrong experts.

The engine is the trainer's model in bf16, which may hold other weights or choose otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_faults import FAULTS, passed, plant
from vllm_lab import models

from flashpatch.verify.exact.certificate import Certificate
from flashpatch.verify.exact.command import tables
from flashpatch.verify.exact.compare import compare
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
    more: list[int] | None = None,
) -> Certificate:
    """The certificate of ``served``, or of the model at that path in bf16, rounded to eight bits if it is quantized."""
    engine = loaded(served, torch.bfloat16) if isinstance(served, Path) else served
    if choose:
        if type(engine.get_submodule(router)).__name__.endswith("Gating"):
            pytest.skip("this transformers' router of Granite returns tokens by expert")
        engine.get_submodule(router).register_forward_hook(choose)
    seen = passed(engine, IDS, quantization, [] if choose else more)
    return compare(lambda dtype: loaded(path, dtype), IDS, seen)


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


def test_experts_that_no_token_reaches_are_not_compared(tmp_path) -> None:
    path = models.checkpoint(tmp_path, "qwen3-moe", num_experts=64)
    found = compared(path, path, more=IDS[:61])
    left = [one for one in found.not_compared if "experts" in one]
    assert left == [f"model.layers.{at}.mlp's experts 61, 62, 63, which no token took" for at in (0, 1)]
    assert found.agrees and not found.ok, found.first
    assert tables(found)[0].title == "compared in part, and that agrees to rounding"
    assert not any("experts" in one for one in compared(path, path).not_compared)


@pytest.mark.parametrize("quantization", ["", "int8", "fp8"])
def test_one_expert_of_many_that_is_wrong_is_named(tmp_path, quantization: str) -> None:
    """Whichever the prompt's tokens take."""
    sizes = dict(num_experts=64, num_experts_per_tok=8)
    path, name = models.checkpoint(tmp_path, "qwen3-moe", **sizes), ROUTERS["qwen3-moe"]
    honest = compared(path, path, quantization=quantization)
    assert honest.agrees, honest.first
    block = name.removesuffix(".gate")
    for expert in (3, 31, 62):
        engine = loaded(path, torch.bfloat16)
        with torch.no_grad():
            for weight in engine.get_submodule(f"{block}.experts").parameters():
                weight[expert] = weight[expert].roll(1, 0)
        found = compared(path, engine, quantization=quantization)
        wrong = [place for place in found.places if place.name == block and place.differs]
        assert found.first in wrong and wrong[-1].kind in (f"expert {expert}", ""), (expert, found.first)
