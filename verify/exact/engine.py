"""Ask a vLLM engine for one sequence, and record its forward pass on each of its ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Any

import torch

from flashpatch.verify.exact.calls import Answered, Call, Prompts, recorded
from flashpatch.verify.exact.causes import BLOCK, CACHED, OTHERS
from flashpatch.verify.exact.certificate import Place
from flashpatch.verify.exact.forced import WHOLE, Part
from flashpatch.verify.exact.routers import taking_turns
from flashpatch.verify.exact.rows import Rows, farthest, of_model, spread
from flashpatch.verify.exact.shards import HEAD, Pair, join, layouts_of, some

LENGTH = "max_model_len"
_KINDS = "pipeline", "data", "prefill_context", "decode_context"
PARALLEL = tuple(f"{kind}_parallel_size" for kind in _KINDS)
STEPS, LONG = 8, 64
"""Decode steps after the prompt that are compared, alone and beside others."""
LATE = 2
"""Steps after which the last sequence of a batch comes."""
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
        also: those before it: at positions far beyond the prompt, each expert in turn; and of sequences beside each other.
        adapter: the folder of the LoRA adapter that it serves, "" if none."""

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
    also: tuple[Pass, ...] = ()
    adapter: str = ""


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

    Each kind of engine has its ``calls(prompts, steps=(0,), part=None)``: what each rank's modules did with these and so many steps of
    decoding each, and what each was answered; and ``cached(ids)``: what they did with the first `BLOCK` tokens, and then with the others."""

    def __init__(
        self, quantization: str | None, layouts: dict[str, Pair], last: int, rows: Rows, adapter: str
    ) -> None:
        self._how, self._layouts, self._last, self._rows = quantization or "", layouts, last, rows
        self._adapter = adapter

    def read(self, ids: list[int], way: str, more: list[int] | None = None, room: int = LONG) -> Pass:
        """Return what modules did with the tokens ``ids``, read in one of `causes.WAYS`; and if ``more`` is given with these far apart,
        and with several sequences at once, of up to ``room`` tokens more than ``ids``."""
        length = len(ids)
        if way == CACHED and length <= BLOCK:
            problem = f"the prompt has {length} tokens, and {BLOCK} are to come before others"
            return Pass([], torch.empty(0), self._how, problem)
        if way == CACHED:
            before, after = self.cached(ids)
            problem = f"the engine does not read {BLOCK} tokens from its prefix cache"
            problem *= after[0][0].returned.shape[0] != length - BLOCK
            calls = [[*early, *late] for early, late in zip(before, after, strict=True)]
            return self._passed(calls, [ids], [WHOLE], problem)[0]
        also = self._beside(ids, room) if more else []
        if more:
            part = Part(max(self._last // max(len(more) - 1, 1), 1), turns=True)
            also = [*self._passed(self.calls([more], part=part)[0], [more], [part]), *also]
        # What fails after some calls shows, as these come last.
        calls, (drawn,) = self.calls([ids], (STEPS,))
        is_compiled = all(call.name in ("", HEAD) for call in calls[0])
        fed = [*ids, *drawn[: 0 if is_compiled else -1]]
        (found,) = self._passed(calls, [fed], [Part(steps=len(fed) - length)])
        return replace(found, also=() if is_compiled else tuple(one for one in also if one.calls))

    def _beside(self, ids: list[int], room: int) -> list[Pass]:
        """Sequences of several lengths, of which one comes while others are answered; they end one after the other."""
        cut = max(len(ids) // (2 + OTHERS), 1)
        prompts = [ids[cut * at :] for at in range(1 + OTHERS)]
        steps = [room * (1 + OTHERS - at) // (1 + OTHERS) for at in range(1 + OTHERS)]
        calls, drawn = self.calls(prompts, steps, late=LATE)
        fed = [[*prompt, *own[:-1]] for prompt, own in zip(prompts, drawn, strict=True)]
        return self._passed(calls, fed, [Part(steps=len(own) - 1, beside=True) for own in drawn])

    def _passed(
        self, calls: list[list[Call]], sequences: list[list[int]], parts: list[Part], problem: str = ""
    ) -> list[Pass]:
        """Return what each rank's model did with each sequence that has a part, as one process would have done it with that alone."""
        ranks = [sorted_out(rank, sequences, parts[0].stride) for rank in calls]
        found = []
        for ids, part, *steps in zip(sequences, parts, *ranks):
            modules, whole = [own for own, _ in steps], steps[0][1]
            one = join(modules, self._layouts)
            logits = whole if part.beside or len(whole) == len(ids) - 1 else torch.empty(0)
            said = (logits, self._how, problem, modules, one.apart, one.left, self._rows, part, ids)
            found.append(Pass(one.calls, *said, adapter=self._adapter))
        return found


class Reader(Asker):
    """Ask a `vllm.LLM` that was `opened`, under the LoRA adapter of a folder if one is named."""

    def __init__(self, llm: Any, adapter: str) -> None:
        from vllm.lora.request import LoRARequest

        self._llm, self._under = llm, LoRARequest("exact", 1, adapter) if adapter else None
        quantization = llm.llm_engine.vllm_config.model_config.quantization
        super().__init__(quantization, *llm.collective_rpc(_described)[0], adapter)

    def calls(
        self,
        prompts: Prompts,
        steps: Sequence[int] = (0,),
        part: Part | None = None,
        late: int = 0,
        skips: bool = True,
    ) -> Answered:
        """The last prompt comes after ``late`` steps."""
        from vllm import SamplingParams

        engine, answers, asked = self._llm.llm_engine, {}, 0
        self._llm.collective_rpc(_start, args=(part, len(prompts[0])))
        while len(answers) < len(prompts):
            for at in range(asked, len(prompts) - (late > 0)):
                own = dict(prompt_logprobs=None if late or at else 0, max_tokens=1 + steps[at])
                plain = dict(temperature=0, detokenize=False, ignore_eos=True)
                plain["skip_reading_prefix_cache"] = skips
                prompt = {"prompt_token_ids": prompts[at]}
                engine.add_request(str(at), prompt, SamplingParams(**plain, **own), lora_request=self._under)
                asked = at + 1
            late -= 1
            done = [answer for answer in engine.step() if answer.finished]
            answers |= {int(answer.request_id): list(answer.outputs[0].token_ids) for answer in done}
        return self._llm.collective_rpc(_stop), [answers[at] for at in range(len(prompts))]

    def cached(self, ids: list[int]) -> tuple[list[list[Call]], list[list[Call]]]:
        self._llm.reset_prefix_cache()
        before, _ = self.calls([ids[: BLOCK + 1]], skips=False)
        return before, self.calls([ids], skips=False)[0]


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


def sorted_out(
    calls: list[Call], sequences: list[list[int]], stride: int = 1
) -> list[tuple[list[Call], torch.Tensor]]:
    """Return by sequence the modules' calls and the logits, of as many of its last positions but one as there are, where the engine read
    them in steps, each of which may have tokens of several. Of one that was not read whole there are none."""
    starts = [at for at, call in enumerate(calls) if call.tokens is not None and call.name != HEAD]
    if not starts:  # compiled: modules are called in no way that shows
        heads = [call.returned for call in calls if call.returned.dim() == 2 and len(call.returned) > 1]
        whole = torch.cat(heads) if heads else torch.empty(0)
        return [([Call(HEAD, torch.empty(0), whole)], whole)] * len(sequences)
    steps = [calls[begin:end] for begin, end in pairwise([*starts, len(calls)])]
    done = [_Sequence(ids) for ids in sequences]
    for step in steps:
        _share(step, done, stride)
    return [own.joined() for own in done]


@dataclass(eq=False)
class _Sequence:
    """A sequence, what was read of it by position, the step and its rows, and the logits there."""

    ids: list[int]
    rows: dict[int, tuple[list[Call], int]] = field(default_factory=dict)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def fits(self, token: int | None, place: int) -> bool:
        """Whether this token can be its next, or one that is read again."""
        return place < len(self.ids) and place <= len(self.rows) and token in (None, self.ids[place])

    def joined(self) -> tuple[list[Call], torch.Tensor]:
        if len(self.rows) < len(self.ids):
            return [], torch.empty(0)
        steps: dict[int, tuple[list[Call], list[int]]] = {}
        for _, (step, row) in sorted(self.rows.items()):
            steps.setdefault(id(step), (step, []))[1].append(row)
        own = [_rows_of(*step) for step in steps.values()]
        if len({tuple(call.name for call in step) for step in own}) > 1:
            return [], torch.empty(0)
        last = list(takewhile(self.logits.__contains__, range(len(self.ids) - 2, -1, -1)))
        whole = torch.stack([self.logits[at] for at in reversed(last)]) if last else torch.empty(0)
        same = [_one(list(parts)) for parts in zip(*own, strict=True)]
        return [*same, Call(HEAD, torch.empty(0), whole)], whole


def _share(step: list[Call], sequences: list[_Sequence], stride: int) -> None:
    """Give each sequence its rows of a step, by the ids and positions that the first module was given, and its logits."""
    *ids, places = step[0].tokens.tolist()
    owners: list[tuple[_Sequence | None, int]] = []
    for row, place in enumerate(at // stride for at in places):
        before = owners[-1] if owners else (None, 0)
        fitting = [own for own in sequences if own.fits(ids[0][row] if ids else None, place)]
        # That of the row before, or one that goes on here, before one that is read again.
        owner = min(
            fitting, key=lambda own: ((own, place - 1) != before, len(own.rows) != place), default=None
        )
        owners.append((owner, place))
        if owner:
            owner.rows[place] = step, row
    ends = [at for at, (own, place) in enumerate(owners) if owners[at + 1 : at + 2] != [(own, place + 1)]]
    heads = [call.returned for call in step if call.name == HEAD and call.returned.numel()]
    for head in (one.reshape(-1, one.shape[-1]) for one in heads):  # of one token alone it is a row
        rows = [at for at, (own, _) in enumerate(owners) if own is sequences[0]][: len(head)]
        if len(head) == len(owners):
            rows = list(range(len(owners)))
        elif len(head) == len(ends):  # for what is drawn next; those of a prompt come after it
            rows, ends = ends, []
        for row, logits in zip(rows, head):
            if owner := owners[row][0]:
                owner.logits[owners[row][1]] = logits


def _rows_of(step: list[Call], rows: list[int]) -> list[Call]:
    """The modules' calls of a step with some rows of each tensor that has a row per token."""
    of = step[0].tokens.shape[-1]

    def some(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[rows] if tensor.dim() and tensor.shape[0] == of else tensor

    calls = [call for call in step if call.name not in ("", HEAD)]
    return [replace(call, given=some(call.given), returned=some(call.returned)) for call in calls]


def _one(parts: list[Call]) -> Call:
    """The calls of one module as one; the first alone if they do not go together. Of a step of one token a row may lack its dimension."""
    found = {}
    for what in ("given", "returned"):
        tensors = [getattr(part, what) for part in parts]
        shape = tensors[0].shape[1:]
        if not (tensors[0].dim() and shape.numel()) or any(one.numel() % shape.numel() for one in tensors):
            return parts[0]
        found[what] = torch.cat([one.reshape(-1, *shape) for one in tensors])
    return replace(parts[0], **found)


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
    cut = slice(count)
    changed = [one.name for one, other in pairs if not torch.equal(one.returned[cut], other.returned[cut])]
    # A module that holds another begins before it, and changes with it.
    return next((name for name in changed if not any(more.startswith(f"{name}.") for more in changed)), "")
