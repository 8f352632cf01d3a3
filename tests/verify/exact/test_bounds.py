"""How large a fault is named in each precision; the engine is the trainer's model in bf16, rounded as that engine is."""

from pathlib import Path

import pytest
import torch
from exact_faults import passed, some_full
from vllm_lab import models

from flashpatch.verify.exact.command import tokens
from flashpatch.verify.exact.compare import compare

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
