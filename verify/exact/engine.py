"""Ask a vLLM engine for one sequence, and record its forward pass on each of its ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from flashpatch.verify.exact.calls import Call, recorded
from flashpatch.verify.exact.causes import ALONE, BESIDE, BLOCK, CACHED, OTHERS
from flashpatch.verify.exact.certificate import Place
from flashpatch.verify.exact.rows import Rows, Turns, of_model, turns_of
from flashpatch.verify.exact.shards import HEAD, Pair, join, layouts_of, some

LENGTH = "max_model_len"
PARALLEL = tuple(
    f"{kind}_parallel_size" for kind in ("pipeline", "data", "prefill_context", "decode_context")
)
_open = ExitStack()
_calls: list[Call] = []


@dataclass(frozen=True)
class Pass:
    """One prefill of an engine.

    Attributes:
        calls: of the modules of its model, and ``ranks`` those that each rank saw.
        logits: [T - 1, V], float32, at each position but the last.
        quantization: how the engine's weights are quantized, "" if they are not.
        problem: why it is none that was asked for, "" if it is.
        apart: where ranks that hold the same disagree; ``left`` are modules that cannot be joined.
        turns: what the first rank turns queries and keys by, and ``rows`` what is kept of its tables' rows."""

    calls: list[Call]
    logits: torch.Tensor
    quantization: str
    problem: str = ""
    ranks: list[list[Call]] = field(default_factory=list)
    apart: list[Place] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    turns: Turns = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)


def defaults(model: str, length: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for ``length`` tokens of a model."""
    return {"model": model, "dtype": "bfloat16", LENGTH: length, "skip_tokenizer_init": True}


def refusal(settings: Mapping[str, Any]) -> str:
    """Say why an engine with these arguments of `vllm.LLM` cannot be looked into; "" if it can."""
    for name in PARALLEL:
        if (settings.get(name) or 1) > 1:
            compared = "only one process, or ranks of tensor parallelism, are compared"
            return f"{name}={settings[name]}, and {compared}"
    return ""


@contextmanager
def opened(**arguments: Any) -> Iterator[Any]:
    """Yield a `vllm.LLM`, eager, so that hooks see every module; it and its workers end with the block.

    Raises ValueError if it opens and does not heed ``head_dtype``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": True, **arguments}
    try:
        llm = LLM(**settings)
        try:
            asked = (settings.get("hf_overrides") or {}).get("head_dtype", "model")
            held = str(llm.llm_engine.vllm_config.model_config.head_dtype).removeprefix("torch.")
            if asked not in ("model", held):
                raise ValueError(f"this vLLM leaves the head in {held}, whatever head_dtype says")
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
    finally:
        cleanup_dist_env_and_memory()


def prefill(llm: Any, ids: list[int], adapter: str = "", read: str = ALONE) -> Pass:
    """Let a `vllm.LLM` that was `opened` read the tokens ``ids``, in one of `causes.WAYS`, under the LoRA adapter of a folder
    if one is named; return what its modules did."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    plain = dict(temperature=0, max_tokens=1, detokenize=False)
    asked = SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=read != CACHED, **plain)
    under = LoRARequest("exact", 1, adapter) if adapter else None

    def calls_of(*prompts: list[int]) -> list[list[Call]]:
        sampling = [asked, *[SamplingParams(**plain)] * (len(prompts) - 1)]
        llm.collective_rpc(_start)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(inputs, sampling, use_tqdm=False, lora_request=under)
        return llm.collective_rpc(_stop)

    config, length = llm.llm_engine.vllm_config.model_config, len(ids)
    problem = ""
    if read == BESIDE:
        others = [ids[at:] + ids[:at] for at in range(1, 1 + OTHERS)]
        calls = calls_of(ids, *others)
        if calls[0][0].returned.shape[0] != length * (1 + OTHERS):
            problem = f"the engine does not read {1 + OTHERS} sequences of {length} tokens in one step"
        calls = [rows_of(rank, length * (1 + OTHERS), length) for rank in calls]
    elif read == CACHED:
        llm.reset_prefix_cache()
        before = [rows_of(rank, BLOCK + 1, BLOCK) for rank in calls_of(ids[: BLOCK + 1])]
        after = calls_of(ids)
        if after[0][0].returned.shape[0] != length - BLOCK:
            problem = f"the engine does not read {BLOCK} tokens from its prefix cache"
        calls = [[*early, *late] for early, late in zip(before, after, strict=True)]
    else:
        calls = calls_of(ids)
    steps = [joined(rank) for rank in calls]
    ranks = [modules for modules, _ in steps]
    logits = steps[0][1] if len(steps[0][1]) == length - 1 else torch.empty(0)
    layouts, turns, rows = llm.collective_rpc(_described)[0]
    whole, how = join(ranks, layouts), config.quantization or ""
    return Pass(whole.calls, logits, how, problem, ranks, whole.apart, whole.left, turns, rows)


def _start(worker: Any) -> None:
    """In a worker: record from here on the calls of the modules of its model."""
    global _calls
    _calls = _open.enter_context(recorded(worker.get_model()))


def _stop(worker: Any) -> list[Call]:
    """In a worker: return what was recorded since `_start`."""
    _open.close()
    return _calls


def _described(worker: Any) -> tuple[dict[str, Pair], Turns, Rows]:
    """In a worker: return how tensors lie on the ranks, by what queries and keys are turned, and what is kept of tables' rows."""
    model = worker.get_model()
    return layouts_of(model), turns_of(model), of_model(model)


def rows_of(calls: list[Call], of: int, count: int) -> list[Call]:
    """Return the calls with the first ``count`` rows of each tensor that has ``of``."""

    def first(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:count] if tensor.dim() and tensor.shape[0] == of else tensor

    return [replace(call, given=first(call.given), returned=first(call.returned)) for call in calls]


def joined(calls: list[Call]) -> tuple[list[Call], torch.Tensor]:
    """Return the modules' calls and the prompt's logits of a prefill that the engine did in one step or in several, each of
    which begins with the same module."""
    starts = [at for at, call in enumerate(calls) if call.name == calls[0].name]
    steps = [calls[begin:end] for begin, end in pairwise([*starts, len(calls)])]
    modules = [[call for call in step if call.name != HEAD] for step in steps]
    if not any(modules):  # compiled: modules are called in no way that shows
        heads = [call.returned for call in calls if call.returned.dim() == 2 and len(call.returned) > 1]
        whole = torch.cat(heads) if heads else torch.empty(0)
        return [Call(HEAD, torch.empty(0), whole)], whole
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


def reload(llm: Any, checkpoint: str) -> None:
    """Load a checkpoint into the engine, as a trainer sends it."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})


def first_changed(before: list[list[Call]], after: list[list[Call]]) -> str:
    """Return the first module that returned other bits in the second pass, with its ranks if not all changed it first;
    "" if none did."""
    changed = [first_change(*calls) for calls in zip(before, after, strict=True)]
    order = [call.name for call in before[0]]
    name = min(filter(None, changed), key=lambda name: order.index(name) if name in order else -1, default="")
    ranks = [rank for rank, first in enumerate(changed) if first == name]
    return name if name in ("", HEAD) else ", ".join(filter(None, (name, some(ranks, len(changed)))))


def first_change(before: list[Call], after: list[Call]) -> str:
    """Return the name of the innermost module that returned other bits in the second pass first; "" if none did."""
    if [call.name for call in before] != [call.name for call in after]:
        return "the order of modules"
    pairs = zip(before, after, strict=True)
    changed = [one.name for one, other in pairs if not torch.equal(one.returned, other.returned)]
    # A module that holds another begins before it, and changes with it.
    return next((name for name in changed if not any(more.startswith(f"{name}.") for more in changed)), "")
