"""How large a fault is named in each precision; the engine is the trainer's model in bf16, rounded as that engine is."""

from dataclasses import replace
from pathlib import Path

import lora_lab
import pytest
import torch
from exact_faults import passed, some_full
from vllm_lab import models

from flashpatch.verify.exact.certificate import Certificate
from flashpatch.verify.exact.command import TEXT, tokens
from flashpatch.verify.exact.compare import adapted, compare
from flashpatch.verify.exact.forced import COLUMN

pytestmark = pytest.mark.slow

PRECISIONS = ("", "fp8", "compressed-tensors")  # bf16, fp8, int8
LEAST: dict[str, tuple[str, str, tuple[float, float, float]]] = {
    "all weights": ("llama", "_proj.weight", (1.005, 1.01, 1.005)),
    "a matrix": ("llama", "layers.1.mlp.down_proj", (1.005, 1.02, 1.005)),
    "a norm": ("llama", "layers.1.post_attention_layernorm", (1.005, 1.005, 1.005)),
    "the head": ("llama", "lm_head", (1.005, 1.005, 1.005)),
    "a bias": ("llama-biased", "layers.1.self_attn.v_proj.bias", (1.1, 2.0, 1.2)),
    "no bias": ("llama-biased", "layers.1.mlp.down_proj.bias", (0.0, 0.0, 0.0)),
    "all biases": ("llama-biased", ".bias", (1.02, 1.5, 1.1)),
    "a router": ("qwen3-moe", "layers.1.mlp.gate.weight", (1.005, 1.005, 1.005)),
}
"""By name: family, what is in the names of the tensors that are larger, and the least factor that is named, by precision."""


def named(path: Path, part: str, factor: float, quantization: str) -> list[str]:
    """Return the places that differ of a model some of whose tensors are larger."""
    from transformers import AutoModelForCausalLM

    def load(dtype: torch.dtype) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()

    (ids, _), engine = tokens(str(path), ""), load(torch.bfloat16)
    with torch.no_grad():
        for name, own in engine.named_parameters():
            own *= factor if part in name else 1
    seen = passed(engine, ids, quantization)
    return [str(place) for place in compare(load, ids, seen).places if place.differs]


@pytest.mark.parametrize("fault", some_full(LEAST, ("all weights", "a bias")))
def test_a_fault_of_that_size_is_named(tmp_path: Path, fault: str) -> None:
    family, part, factors = LEAST[fault]
    path = models.checkpoint(tmp_path, family)
    for factor, quantization in zip(factors, PRECISIONS, strict=True):
        where = named(path, part, factor, quantization)
        assert any(one.startswith(("model.layers.", "model.norm", "lm_head")) for one in where), quantization
        assert not named(path, part, 1.0, quantization)


@pytest.mark.parametrize("quantization", PRECISIONS)
def test_an_adapter_beside_its_base_rounds_otherwise_than_one_merged_in(tmp_path: Path, quantization: str):
    """Its base has weights that the merged model rounded to bf16 once more, by as much for all tokens."""
    from transformers import AutoModelForCausalLM

    def certified(served: bool, factor: float = 1.0) -> Certificate:
        engine = load(torch.bfloat16, base)
        for name, (a, b) in adapted(adapter).items():
            product = torch.nn.functional.linear
            engine.get_submodule(name).register_forward_hook(
                lambda _, given, own, a=a, b=b: (
                    own + factor * product(product(given[0], a.bfloat16()), b.bfloat16())
                )
            )
        seen = passed(engine, tokens(base, TEXT)[0], quantization)
        also = tuple(replace(one, adapter=adapter * served) for one in seen.also)
        return compare(load, seen.ids, replace(seen, adapter=adapter * served, also=also))

    def load(dtype: torch.dtype, path: str = "") -> torch.nn.Module:
        path = path or lora_lab.merged(base, 1)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()

    base = str(models.checkpoint(tmp_path, "llama"))
    adapter = lora_lab.write(tmp_path / "adapter", lora_lab.tensors(base, 1))
    assert certified(served=True).agrees
    assert quantization or certified(served=False).first.kind == COLUMN + "scale"
    assert certified(served=True, factor=2.0).first.name == "model.layers.0.self_attn.q_proj"
