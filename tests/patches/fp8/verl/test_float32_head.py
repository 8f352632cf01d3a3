"""The trainer's head in float32: values and gradients; what would leave one side in bf16 is refused."""

from typing import Any

import pytest
import torch
import transformers

from flashpatch.errors import PatchError
from flashpatch.patches._shared.verl_config import JobConfig
from flashpatch.patches.fp8.verl.float32_head import ACTOR, MODEL, ROLLOUT, check, use_float32


def tiny(tied: bool) -> Any:
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    config = transformers.Qwen2Config(**sizes, num_key_value_heads=4, tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config).bfloat16()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_are_those_of_float64(tied: bool) -> None:
    model = tiny(tied)
    head, seen = model.get_output_embeddings(), []
    model.model.register_forward_hook(lambda *call: seen.append(call[2][0]))
    ids = torch.arange(12)[None]

    def logits() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids).logits

    stock = logits()
    exact = seen[0].double() @ head.weight.double().t()
    assert stock.dtype == torch.bfloat16 and (stock.double() - exact).abs().max() > 1e-4
    use_float32(model)
    found = logits()
    assert found.dtype == torch.float32 and (found.double() - exact).abs().max() < 1e-6
    hidden = seen[-1]
    hidden.retain_grad()
    torch.log_softmax(found, -1)[0, :, 3].sum().backward()
    again = hidden.detach().double().requires_grad_()
    torch.log_softmax(again @ head.weight.double().t(), -1)[0, :, 3].sum().backward()
    assert torch.allclose(hidden.grad.double(), again.grad, rtol=1e-2, atol=1e-5)
    assert head.weight.grad is not None and head.weight.grad.dtype == torch.bfloat16


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    model = tiny(False)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(PatchError, match="no linear layer"):
        use_float32(model)


class Job(JobConfig):
    """A configuration as a plain mapping."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(None, "fp8.verl.validate_config_correction")
        self.values = {f"{ACTOR}.strategy": "fsdp2", f"{ROLLOUT}.name": "vllm", **changes}

    def get(self, path: str, default: Any = None) -> Any:
        return self.values.get(path, default)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{ACTOR}.strategy", "megatron"),
        (f"{MODEL}.use_fused_kernels", True),
        (f"{ROLLOUT}.name", "hf"),
        (f"{MODEL}.lora_rank", 8),
    ],
)
def test_one_side_alone_is_refused(path: str, value: Any) -> None:
    with pytest.raises(PatchError, match="on both sides") as caught:
        check(Job(**{path: value}), "float32")
    assert f"{path}={value}" in str(caught.value)
    check(Job(**{path: value}), "")


def test_both_sides_are_not() -> None:
    check(Job(), "float32")
    check(Job(**{f"{ROLLOUT}.name": "sglang", f"{ACTOR}.strategy": "fsdp"}), "float32")
