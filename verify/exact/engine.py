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
from flashpatch.verify.exact.causes import BESIDE, BLOCK, CACHED, OTHERS
from flashpatch.verify.exact.certificate import Place
from flashpatch.verify.exact.forced import WHOLE, Part
from flashpatch.verify.exact.routers import taking_turns
from flashpatch.verify.exact.rows import Rows, farthest, of_model, spread
from flashpatch.verify.exact.shards import HEAD, Pair, join, layouts_of, some

LENGTH = "max_model_len"
PARALLEL = tuple(
    f"{kind}_parallel_size" for kind in ("pipeline", "data", "prefill_context", "decode_context")
)
STEPS = 8
"""Decode steps after the prompt that are compared."""
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
        rows: what is kept of its tables' rows.
        part: how the tokens were read, and ``ids`` which these are: with those that the engine answered in decode steps.
        far: a second one, at positions far beyond the prompt, each expert in turn."""

    calls: list[Call]
    logits: torch.Tensor
    quantization: str
    problem: str = ""
    ranks: list[list[Call]] = field(default_factory=list)
    apart: list[Place] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    rows: Rows = field(default_factory=dict)
    part: Part = WHOLE
    ids: list[int] = field(default_factory=list)
    far: Pass | None = None


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


class Asker:
    """Let an engine read sequences, and return what the modules of its model did.

    Each kind of engine has its ``calls(*prompts, part=None, steps=0)``: what each rank's modules did in one step and so many of decoding,
    and what the first prompt was answered; and ``cached(ids)``: what they did with the first `BLOCK` tokens, and then with the others."""

    def __init__(self, quantization: str | None, layouts: dict[str, Pair], last: int, rows: Rows) -> None:
        self._how, self._layouts, self._last, self._rows = quantization or "", layouts, last, rows

    def read(self, ids: list[int], way: str, more: list[int] | None = None) -> Pass:
        """Return what modules did with the tokens ``ids``, read in one of `causes.WAYS`; and far apart with ``more``, if it is given."""
        length, rows = len(ids), len(ids) * (1 + OTHERS)
        if way == BESIDE:
            calls, _ = self.calls(ids, *[ids[at:] + ids[:at] for at in range(1, 1 + OTHERS)])
            problem = f"the engine does not read {1 + OTHERS} sequences of {length} tokens in one step"
            problem *= calls[0][0].returned.shape[0] != rows
            return self._passed([rows_of(rank, rows, length) for rank in calls], ids, WHOLE, problem)
        if way == CACHED and length <= BLOCK:
            problem = f"the prompt has {length} tokens, and {BLOCK} are to come before others"
            return Pass([], torch.empty(0), self._how, problem)
        if way == CACHED:
            before, after = self.cached(ids)
            problem = f"the engine does not read {BLOCK} tokens from its prefix cache"
            problem *= after[0][0].returned.shape[0] != length - BLOCK
            calls = [[*early, *late] for early, late in zip(before, after, strict=True)]
            return self._passed(calls, ids, WHOLE, problem)
        far = self._far(more) if more else None
        # What fails after some calls shows, as these come last.
        calls, drawn = self.calls(ids, steps=STEPS)
        is_compiled = all(call.name == HEAD for call in calls[0])
        fed = [*ids, *drawn[: 0 if is_compiled else -1]]
        found = self._passed(calls, fed, Part(steps=len(fed) - length))
        return replace(found, far=None if is_compiled else far)

    def _far(self, ids: list[int]) -> Pass:
        part = Part(max(self._last // max(len(ids) - 1, 1), 1), turns=True)
        return self._passed(self.calls(ids, part=part)[0], ids, part)

    def _passed(self, calls: list[list[Call]], ids: list[int], part: Part, problem: str = "") -> Pass:
        """Return what each rank's model did with these tokens, as one process would have done it."""
        steps = [joined(rank) for rank in calls]
        ranks, whole = [modules for modules, _ in steps], steps[0][1]
        one, logits = join(ranks, self._layouts), whole if len(whole) == len(ids) - 1 else torch.empty(0)
        return Pass(one.calls, logits, self._how, problem, ranks, one.apart, one.left, self._rows, part, ids)


class Reader(Asker):
    """Ask a `vllm.LLM` that was `opened`, under the LoRA adapter of a folder if one is named."""

    def __init__(self, llm: Any, adapter: str) -> None:
        from vllm.lora.request import LoRARequest

        self._llm, self._under = llm, LoRARequest("exact", 1, adapter) if adapter else None
        quantization = llm.llm_engine.vllm_config.model_config.quantization
        super().__init__(quantization, *llm.collective_rpc(_described)[0])

    def calls(
        self, *prompts: list[int], part: Part | None = None, steps: int = 0, skips: bool = True
    ) -> tuple[list[list[Call]], list[int]]:
        from vllm import SamplingParams

        plain = dict(temperature=0, detokenize=False, ignore_eos=True)
        own = dict(skip_reading_prefix_cache=skips, prompt_logprobs=0, max_tokens=1 + steps)
        self._llm.collective_rpc(_start, args=(part, len(prompts[0])))
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        others = [SamplingParams(**plain, max_tokens=1)] * (len(prompts) - 1)
        each = [SamplingParams(**plain, **own), *others]
        answers = self._llm.generate(inputs, each, use_tqdm=False, lora_request=self._under)
        return self._llm.collective_rpc(_stop), list(answers[0].outputs[0].token_ids)

    def cached(self, ids: list[int]) -> tuple[list[list[Call]], list[list[Call]]]:
        self._llm.reset_prefix_cache()
        before, _ = self.calls(ids[: BLOCK + 1], skips=False)
        after, _ = self.calls(ids, skips=False)
        return [rows_of(rank, BLOCK + 1, BLOCK) for rank in before], after


@contextmanager
def watched(model: torch.nn.Module, part: Part | None, count: int) -> Iterator[list[Call]]:
    """Within, record the calls of the modules of a model, which reads ``count`` tokens in that way."""
    with ExitStack() as stack:
        if part:
            stack.enter_context(taking_turns(model))
            stack.enter_context(spread(model, part.stride, count))
        yield stack.enter_context(recorded(model))


def _start(worker: Any, part: Part | None, count: int) -> None:
    """In a worker: see `watched`, until `_stop`."""
    global _calls
    _calls = _open.enter_context(watched(worker.get_model(), part, count))


def _stop(worker: Any) -> list[Call]:
    """In a worker: return what was recorded since `_start`."""
    _open.close()
    return _calls


def _described(worker: Any) -> tuple[dict[str, Pair], int, Rows]:
    """In a worker: return how tensors lie on the ranks, the last position that it knows, and what is kept of tables' rows."""
    model = worker.get_model()
    return layouts_of(model), farthest(model), of_model(model)


def rows_of(calls: list[Call], of: int, count: int) -> list[Call]:
    """Return the calls with the first ``count`` rows of each tensor that has ``of``."""

    def first(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:count] if tensor.dim() and tensor.shape[0] == of else tensor

    return [replace(call, given=first(call.given), returned=first(call.returned)) for call in calls]


def joined(calls: list[Call]) -> tuple[list[Call], torch.Tensor]:
    """Return the modules' calls and the logits, at each position but the last, of tokens that the engine read in one step or in several,
    each of which begins with the same module."""
    starts = [at for at, call in enumerate(calls) if call.name == calls[0].name]
    first = {call.name: call for call in calls[: starts[1] if len(starts) > 1 else None] if call.name != HEAD}
    calls = [_in_rows(call, first.get(call.name)) for call in calls]
    steps = [calls[begin:end] for begin, end in pairwise([*starts, len(calls)])]
    modules = [[call for call in step if call.name != HEAD] for step in steps]
    if not any(modules):  # compiled: modules are called in no way that shows
        heads = [call.returned for call in calls if call.returned.dim() == 2 and len(call.returned) > 1]
        whole = torch.cat(heads) if heads else torch.empty(0)
        return [Call(HEAD, torch.empty(0), whole)], whole
    logits = []
    for step, own in zip(steps, modules, strict=True):
        tokens = own[0].returned.shape[0]
        heads = [call.returned for call in step if call.name == HEAD and call.returned.dim() == 2]
        found = [head for head in heads if tokens - 1 <= len(head) <= tokens][-1:]
        if (
            found and len(found[0]) < tokens
        ):  # those after its last token come from the call that draws the next
            found += [head for head in heads if len(head) == 1][:1]
        logits += found
    if len({tuple(call.name for call in own) for own in modules}) > 1:
        return calls, torch.empty(0)
    whole = (
        torch.cat(logits)[: sum(len(own[0].returned) for own in modules) - 1] if logits else torch.empty(0)
    )
    same = [_one(list(parts)) for parts in zip(*modules, strict=True)]
    return [*same, Call(HEAD, torch.empty(0), whole)], whole


def _in_rows(call: Call, like: Call | None) -> Call:
    """A call whose tensors have a row per token, in a step of one token too, as in the step before, or as logits have."""

    def rows(tensor: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        wanted = 2 if other is None else other.dim()
        return tensor[None] if tensor.dim() == wanted - 1 and tensor.numel() else tensor

    mine = replace(call, returned=rows(call.returned, like and like.returned))
    return mine if like is None else replace(mine, given=rows(call.given, like.given))


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


def first_changed(before: list[list[Call]], after: list[list[Call]], prompt: int | None = None) -> str:
    """Return the first module that returned other bits of the ``prompt`` in the second pass, with its ranks if not all changed it first;
    "" if none did. After the prompt an engine that changed may read other tokens."""
    changed = [first_change(*calls, prompt) for calls in zip(before, after, strict=True)]
    order = [call.name for call in before[0]]
    name = min(filter(None, changed), key=lambda name: order.index(name) if name in order else -1, default="")
    ranks = [rank for rank, first in enumerate(changed) if first == name]
    return name if name in ("", HEAD) else ", ".join(filter(None, (name, some(ranks, len(changed)))))


def first_change(before: list[Call], after: list[Call], count: int | None = None) -> str:
    """Return the name of the innermost module that first returned other bits for ``count`` tokens in the second pass; "" if none did."""
    if [call.name for call in before] != [call.name for call in after]:
        return "the order of modules"
    pairs = zip(before, after, strict=True)
    changed = [
        one.name for one, other in pairs if not torch.equal(one.returned[:count], other.returned[:count])
    ]
    # A module that holds another begins before it, and changes with it.
    return next((name for name in changed if not any(more.startswith(f"{name}.") for more in changed)), "")
