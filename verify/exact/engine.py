"""Ask a vLLM engine for one sequence, and record its forward pass on each of its ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from flashpatch.verify import sampled
from flashpatch.verify.exact.calls import Call, recorded
from flashpatch.verify.exact.causes import ALONE, BESIDE, BLOCK, CACHED, OTHERS
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
CLOSE = 2.0**-8
"""By how much a log-probability that an engine returns may be off that of its own logits, nats."""
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
        far: a second one, at positions far beyond the prompt, each expert in turn; ``unasked`` is what else was not."""

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
    unasked: tuple[str, ...] = ()


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


def prefill(
    llm: Any, ids: list[int], adapter: str = "", read: str = ALONE, more: list[int] | None = None
) -> Pass:
    """Let a `vllm.LLM` that was `opened` read the tokens ``ids``, in one of `causes.WAYS`, under the LoRA adapter of a folder
    if one is named; return what its modules did. With the tokens ``more`` it answers sampled requests before, and reads these."""
    reader, length = _Reader(llm, adapter, read == CACHED), len(ids)
    if read == BESIDE:
        calls, _ = reader.calls(ids, *[ids[at:] + ids[:at] for at in range(1, 1 + OTHERS)])
        problem = f"the engine does not read {1 + OTHERS} sequences of {length} tokens in one step"
        problem *= calls[0][0].returned.shape[0] != length * (1 + OTHERS)
        return reader.passed(
            [rows_of(rank, length * (1 + OTHERS), length) for rank in calls], ids, WHOLE, problem
        )
    if read == CACHED:
        llm.reset_prefix_cache()
        before = [rows_of(rank, BLOCK + 1, BLOCK) for rank in reader.calls(ids[: BLOCK + 1])[0]]
        after, _ = reader.calls(ids)
        problem = f"the engine does not read {BLOCK} tokens from its prefix cache"
        problem *= after[0][0].returned.shape[0] != length - BLOCK
        return reader.passed(
            [[*early, *late] for early, late in zip(before, after, strict=True)], ids, WHOLE, problem
        )
    tally = reader.sampled(ids[: sampled.PROMPT]) if more else None
    far = reader.far(more) if more else None
    # What fails after some calls shows, as these come last.
    calls, answer = reader.calls(ids, prompt_logprobs=0, max_tokens=STEPS + 1, logprobs=0)
    is_compiled = all(call.name == HEAD for call in calls[0])
    drawn, scores = _answered(answer)
    fed = [*ids, *drawn[: 0 if is_compiled else -1]]
    found = reader.passed(calls, fed, Part(steps=len(fed) - length))
    if not tally:
        return found
    scores = [*(row[token].logprob for token, row in zip(ids[1:], answer.prompt_logprobs[1:])), *scores]
    if not tally.missed:
        tally.compare(found.logits.log_softmax(-1), fed[1:], scores[: len(fed) - 1])
    places = [*found.apart, *of_sampler(tally)]
    return replace(found, apart=places, unasked=tuple(tally.missed), far=None if is_compiled else far)


class _Reader:
    """Let a `vllm.LLM` read sequences, under an adapter if one is named, and return what its modules did."""

    def __init__(self, llm: Any, adapter: str, cached: bool) -> None:
        from vllm.lora.request import LoRARequest

        self._llm, self._skips = llm, not cached
        self._under = LoRARequest("exact", 1, adapter) if adapter else None
        self._config = llm.llm_engine.vllm_config.model_config
        self._layouts, self._farthest, self._rows = llm.collective_rpc(_described)[0]

    def calls(
        self, *prompts: list[int], part: Part | None = None, **asked: Any
    ) -> tuple[list[list[Call]], Any]:
        """Return what each rank's modules did, and what the first prompt was answered."""
        from vllm import SamplingParams

        plain = dict(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
        first = SamplingParams(
            **plain | {"skip_reading_prefix_cache": self._skips} | (asked or {"prompt_logprobs": 0})
        )
        self._llm.collective_rpc(_start, args=(part, len(prompts[0])))
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        each = [first, *[SamplingParams(**plain)] * (len(prompts) - 1)]
        answers = self._llm.generate(inputs, each, use_tqdm=False, lora_request=self._under)
        return self._llm.collective_rpc(_stop), answers[0]

    def passed(self, calls: list[list[Call]], ids: list[int], part: Part, problem: str = "") -> Pass:
        """Return what each rank's model did with these tokens, as one process would have done it."""
        steps = [joined(rank) for rank in calls]
        ranks, whole = [modules for modules, _ in steps], steps[0][1]
        one, logits = join(ranks, self._layouts), whole if len(whole) == len(ids) - 1 else torch.empty(0)
        how = self._config.quantization or ""
        return Pass(one.calls, logits, how, problem, ranks, one.apart, one.left, self._rows, part, ids)

    def far(self, ids: list[int]) -> Pass:
        part = Part(max(self._farthest // max(len(ids) - 1, 1), 1), turns=True)
        return self.passed(self.calls(ids, part=part)[0], ids, part)

    def sampled(self, prompt: list[int]) -> sampled.Tally:
        tally, returned = sampled.Tally(CLOSE), self._config.logprobs_mode.removesuffix("_logprobs")
        for asked in sampled.ALONE:
            calls, answer = self.calls(prompt, logprobs=0, max_tokens=sampled.TOKENS, **asked)
            tokens, scores = _answered(answer)
            tally.add(last_logits(calls[0], len(tokens)), prompt, asked, tokens, scores, returned)
        return tally


def _answered(answer: Any) -> tuple[list[int], list[float]]:
    """The tokens of an answer, and the log-probability that the engine returned for each."""
    found = answer.outputs[0]
    return list(found.token_ids), [row[token].logprob for token, row in zip(found.token_ids, found.logprobs)]


def of_sampler(tally: sampled.Tally) -> Iterator[Place]:
    """Yield the places of what a sampler did."""
    if tally.tokens:
        outside, off = "tokens outside what it draws from", "likelihood of its tokens, in standard deviations"
        yield Place("the sampler", tally.outside / tally.tokens, 1e-9, "", outside)
        yield Place("the sampler", tally.off, sampled.SURE, "", off)
    yield Place("log-probabilities that are returned", tally.worst, CLOSE)


def last_logits(calls: list[Call], count: int) -> torch.Tensor:
    """Return the logits that the last ``count`` tokens were drawn with."""
    heads = [_in_rows(call, None).returned[-1:] for call in calls if call.name == HEAD]
    return torch.cat(heads[-count:]) if heads else torch.empty(0)


def _start(worker: Any, part: Part | None, count: int) -> None:
    """In a worker: record from here on the calls of the modules of its model, which reads ``count`` tokens in that way."""
    global _calls
    model = worker.get_model()
    if part:
        _open.enter_context(taking_turns(model))
        _open.enter_context(spread(model, part.stride, count))
    _calls = _open.enter_context(recorded(model))


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
    """Return the first module that returned other bits in the second pass, with its ranks if not all changed it first;
    "" if none did. Those of the ``prompt`` come first: after it an engine that changed may read other tokens."""
    changed: list[str] = []
    for count in (prompt, None):
        if not any(changed):
            changed = [first_change(*calls, count) for calls in zip(before, after, strict=True)]
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
