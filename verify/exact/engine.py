"""Ask a vLLM engine of this process for one sequence, and record its forward pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from flashpatch.verify.exact.calls import Call, recorded

HEAD = "logits_processor"


@dataclass(frozen=True)
class Pass:
    """One prefill of an engine.

    Attributes:
        calls: of the modules of its model.
        logits: [T - 1, V], float32, at each position but the last.
        quantization: how the engine's weights are quantized, "" if they are not.
    """

    calls: list[Call]
    logits: torch.Tensor
    quantization: str


@contextmanager
def opened(**arguments: Any) -> Iterator[Any]:
    """Yield a `vllm.LLM` whose worker is in this process, eager, so that hooks see every module; it ends with the block."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": True, **arguments}
    try:
        llm = LLM(**settings)
        yield llm
        del llm
    finally:
        cleanup_dist_env_and_memory()


def prefill(llm: Any, ids: list[int], adapter: str = "") -> Pass:
    """Let the engine read the tokens ``ids``, under a LoRA adapter if one is named; return what its modules did."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    driver = llm.llm_engine.model_executor.driver_worker
    model = getattr(driver, "worker", driver).model_runner.get_model()
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    under = LoRARequest("exact", 1, adapter) if adapter else None
    with recorded(model) as calls:
        llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False, lora_request=under)
    config = llm.llm_engine.vllm_config.model_config
    modules, logits = joined(calls)
    return Pass(modules, logits if len(logits) == len(ids) - 1 else torch.empty(0), config.quantization or "")


def joined(calls: list[Call]) -> tuple[list[Call], torch.Tensor]:
    """Return the modules' calls and the prompt's logits of a prefill that the engine did in one step or in several.

    Args:
        calls: in the order in which they began; each step begins with the same module.
    """
    starts = [at for at, call in enumerate(calls) if call.name == calls[0].name]
    steps = [calls[begin:end] for begin, end in pairwise([*starts, len(calls)])]
    modules = [[call for call in step if call.name != HEAD] for step in steps]
    logits = []
    for step, own in zip(steps, modules, strict=True):
        tokens = own[0].returned.shape[0]  # the last step has no logits after its last token
        heads = [call.returned for call in step if call.name == HEAD and call.returned.dim() == 2]
        logits += [head for head in heads if tokens - 1 <= len(head) <= tokens][-1:]
    if len({tuple(call.name for call in own) for own in modules}) > 1:
        return calls, torch.empty(0)
    whole = torch.cat(logits) if logits else torch.empty(0)
    same = [_one(list(parts)) for parts in zip(*modules, strict=True)]
    return [*same, Call(HEAD, torch.empty(0), whole)], whole


def _one(parts: list[Call]) -> Call:
    """The calls of one module as one; the first alone if they do not go together."""
    given, returned = ([getattr(part, what) for part in parts] for what in ("given", "returned"))
    whole = all(len({tensor.shape[1:] for tensor in some if tensor.dim()}) == 1 for some in (given, returned))
    if len(parts) == 1 or not whole or any(tensor.dim() == 0 for tensor in (*given, *returned)):
        return parts[0]
    return replace(parts[0], given=torch.cat(given), returned=torch.cat(returned))


def first_changes(
    llm: Any, ids: list[int], first: Pass, checkpoint: str, syncs: int, adapter: str = ""
) -> list[str]:
    """Load the trainer's checkpoint into the engine ``syncs`` times, as a trainer at learning rate 0 sends it.

    Returns:
        Per time, the first module that then returned other bits than in ``first``, or "".
    """
    found = []
    for _ in range(syncs):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
        found.append(_first_change(first.calls, prefill(llm, ids, adapter).calls))
    return found


def _first_change(before: list[Call], after: list[Call]) -> str:
    if [call.name for call in before] != [call.name for call in after]:
        return "the order of modules"
    pairs = zip(before, after, strict=True)
    changed = [one.name for one, other in pairs if not torch.equal(one.returned, other.returned)]
    # A module that holds another begins before it, and changes with it.
    return next((name for name in changed if not any(more.startswith(f"{name}.") for more in changed)), "")
