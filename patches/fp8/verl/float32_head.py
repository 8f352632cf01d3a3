"""Compute the lm_head in float32 on the trainer's side too, if the rollouts do."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.verl_config import Get, JobConfig, forbidden

ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{name}" for name in ("rollout", "actor", "model"))
ADVICE = "Change these settings, or unset fp8's option lm_head."


@Patches("fp8", "verl>=0.9").wrap(
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module",
    relies_on="self.model_config.model_type",
    evidence="optional",
    when="lm_head=float32 anywhere=fp8.verl.validate_config_correction",
    scope="trainer",
    why="With a head in float32 in the rollouts alone, their log-probabilities and the trainer's, whose logits are rounded to "
    "bf16, differ by that rounding.",
    remove_when="verl computes the head in float32 on both sides by a setting.",
)
def build_module(original, self, *args: Any, **kwargs: Any) -> Any:
    """With the option lm_head=float32, let the model's head multiply in float32, under autocast too.

    Raises PatchError if the model has no head that is a linear layer."""
    module = original(self, *args, **kwargs)
    if engine.options("fp8")["lm_head"] == "float32" and self.model_config.model_type == "language_model":
        use_float32(module)
    return module


def use_float32(model: Any) -> None:
    """Let a Hugging Face model's output embeddings multiply and return float32, under autocast too.

    The product has the weight as FSDP gathers it, in bf16 by default: the values that the engine holds. Raises
    PatchError if they are no linear layer."""
    import torch

    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise PatchError(
            f"the head of {type(model).__name__} is no linear layer ({type(head).__name__}) and is not computed in float32.",
            **Patches.at(build_module),
            advice=ADVICE,
        )
    head.forward = types.MethodType(_forward, head)


def _forward(self, hidden_states: Any) -> Any:
    import torch

    with torch.autocast(hidden_states.device.type, enabled=False):
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(hidden_states.float(), self.weight.float(), bias)


def check(job: JobConfig, lm_head: str) -> None:
    """Refuse a job whose rollouts compute the head in float32 (the family's option ``lm_head``) and whose trainer would
    not, or the other way round. Raises PatchError, which names all settings that stand against it."""
    if lm_head == "float32":
        job.refuse(refusals(job.get), "cannot compute the lm_head in float32 on both sides with", ADVICE)


def refusals(get: Get) -> Iterator[str]:
    """Yield the settings under which one side would compute the head otherwise, each with the reason."""
    strategy = get(f"{ACTOR}.strategy")
    if strategy not in ("fsdp", "fsdp2"):
        yield f"{ACTOR}.strategy={strategy} (only FSDP actors do)"
    engine_name = get(f"{ROLLOUT}.name", "vllm")
    if engine_name not in ("vllm", "sglang"):
        yield f"{ROLLOUT}.name={engine_name} (only vLLM and SGLang do)"
    fused = {f"{MODEL}.use_fused_kernels": "they multiply by themselves, in the model's dtype"}
    adapters = f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"
    yield from forbidden(
        get, fused | dict.fromkeys(adapters, "the engine's head is another class beside adapters")
    )
