"""Carry kept tokens from an agent loop's log-probabilities into its sample, and renormalize the FSDP actor's over them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import holding
from flashpatch.patches.fp8.support.kept import NO_SET, TOO_MANY, renormalized, table

if TYPE_CHECKING:
    from flashpatch.arming.site import Site

LOOP = "verl.experimental.agent_loop.agent_loop"
FIELD = "kept_ids"
"""A sample's field: ``(tokens of the response, support)``, int32."""

_HELD = "_flashpatch_kept_ids"

patches = Patches(
    "fp8",
    "verl>=0.9",
    evidence="optional",
    when="support!=0 anywhere=fp8.verl.validate_config_correction",
    scope="trainer",
    why="Under top-p, top-k or min-p tokens are drawn from the kept ones, and the trainer's probabilities are over all: each "
    "ratio is off by the kept mass, and the gradient is that of another policy.",
    remove_when="verl renormalizes over sampling masks.",
)


@patches.register(
    f"{LOOP}:AgentLoopOutput.as_dict",
    relies_on=("self.model_dump", "response_logprobs", f"{LOOP}:AgentLoopOutput.response_logprobs"),
    params="self",
    scope="driver",
    why="verl's agent loops carry a token's log-probability to the trainer, and nothing of what it was drawn from.",
    remove_when="verl carries sampling masks.",
)
def agent_loop_output_as_dict(site: Site) -> Callable[[], None]:
    """With the option support, take the kept ids from the log-probabilities that they came with, whichever agent loop put them
    together, and add them to the sample as a field of its own.

    The class gets a constructor, as pydantic's makes plain numbers of log-probabilities."""
    inherited = site.owner.__init__

    @functools.wraps(inherited)
    def construct(self: Any, /, **data: Any) -> None:
        inherited(self, **data)
        width, logprobs = engine.options("fp8")["support"], data.get("response_logprobs")
        if width and isinstance(logprobs, list):
            self.__dict__[_HELD] = table(logprobs, width)

    def take_away() -> None:
        if "__init__" in vars(site.owner):
            del site.owner.__init__
        site.unwrap()

    site.wrap(_as_dict)
    site.owner.__init__ = construct
    return take_away


def _as_dict(original, self) -> dict[str, Any]:
    """Add the ids of its tokens to the sample, which is the result."""
    import torch

    fields, width = original(self), engine.options("fp8")["support"]
    if width:  # every sample has the field, or a batch could not be made of them
        found = self.__dict__.get(_HELD)
        rows = table([0.0] * len(fields["responses"]), width) if found is None else found
        fields[FIELD] = torch.from_numpy(rows)
    return fields


class Rows(NamedTuple):
    """Hold what a micro-batch's tokens were drawn from.

    Attributes:
        ids: ``(packed tokens, width)``; a row has the kept ids of the token that follows.
        part, parts: which of how many equal parts of the rows this rank has.
        used: has an entry once log-probabilities were computed from them."""

    ids: Any
    part: int
    parts: int
    used: list[bool]


_ROWS: ContextVar[Rows | None] = ContextVar("flashpatch_kept_rows", default=None)


@patches.wrap(
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.prepare_model_outputs",
    relies_on=(
        "logprobs_from_logits",
        "input_ids.offsets",
        "verl.utils.ulysses:ulysses_pad_and_slice_inputs",
    ),
)
def prepare_model_outputs(
    original, self, output: Any, output_args: Any, micro_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """With the option support, line up the kept ids of the micro-batch with its packed tokens, or this rank's part.

    Raises PatchError if a token to train on has no kept ids, or they were not used."""
    if FIELD not in micro_batch.keys():
        return original(self, output, output_args, micro_batch, *args, **kwargs)
    part, parts = 0, 1
    if self.use_ulysses_sp:
        from torch import distributed

        group = self.ulysses_parallel_group
        part, parts = distributed.get_rank(group), distributed.get_world_size(group)
    rows = Rows(packed(micro_batch), part, parts, [])
    with holding(_ROWS, rows):
        result = original(self, output, output_args, micro_batch, *args, **kwargs)
    if not rows.used:
        raise _stop("log-probabilities were computed without them, for example by fused kernels")
    return result


def packed(micro_batch: Any) -> Any:
    """Return the kept ids in the order of the model's tokens, ``(packed tokens, width)``, `NO_SET` where there are
    none. ``micro_batch`` has jagged ``input_ids``. Raises PatchError if a token to train on has none, or more than are
    carried."""
    offsets, kept = micro_batch["input_ids"].offsets().tolist(), micro_batch[FIELD].unbind()
    prompts, masks = _lengths(micro_batch), micro_batch["loss_mask"].unbind()
    ids = kept[0].new_full((offsets[-1], kept[0].shape[-1]), NO_SET)
    for start, end, prompt, rows, mask in zip(offsets, offsets[1:], prompts, kept, masks, strict=False):
        length = end - start - prompt
        trained = mask[:length].bool()
        if not trained.any():  # padding: its rows are those of another sample
            continue
        rows = rows[:length]
        if len(rows) < length:
            raise _stop(f"a response of {length} tokens came with ids of {len(rows)}")
        _check(rows[trained])
        rows = rows.masked_fill(~trained[:, None], NO_SET)
        ids[start + prompt - 1 : end - 1] = rows  # the logits before a token are those that it was drawn from
    return ids


def _check(trained: Any) -> None:
    without, beyond = int((trained[:, 0] == NO_SET).sum()), int((trained[:, 0] == TOO_MANY).sum())
    if without:
        raise _stop(
            f"{without} of {len(trained)} tokens to train on came without the ids that they were drawn from"
        )
    if beyond:
        raise PatchError(
            f"{beyond} of {len(trained)} tokens were drawn from more than {trained.shape[1]} kept ones: of equal logits "
            "top_k keeps all.",
            **patches.at(prepare_model_outputs),
            advice="Raise fp8's option support, twice top_k is plenty, or lower actor_rollout_ref.rollout.top_k.",
        )


def _lengths(micro_batch: Any) -> list[int]:
    prompts = micro_batch["prompts"]
    if prompts.is_nested:
        return prompts.offsets().diff().tolist()
    return micro_batch["attention_mask"][:, : prompts.shape[1]].sum(1).tolist()


@patches.wrap("verl.utils.torch_functional:logprobs_from_logits")
def logprobs_from_logits(original, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the log-probability of a sampled token over its kept ids, in value and gradient.

    Those of other tokens, which verl's losses mask, are over all, without gradient. Raises PatchError if a token is not
    among those that it was drawn from."""
    import torch

    rows = _ROWS.get()
    if rows is None:
        return original(logits, labels, *args, **kwargs)
    rows.used.append(True)
    count = len(logits)
    ids = rows.ids[rows.part * count : (rows.part + 1) * count]
    ids = torch.nn.functional.pad(ids, (0, 0, 0, count - len(ids)), value=NO_SET)
    known = ids[:, 0] != NO_SET
    strange = known & ~(ids == labels[:, None]).any(-1)
    if strange.any():
        raise _stop(
            f"{int(strange.sum())} of {int(known.sum())} sampled tokens are not among the ids that came with them"
        )
    with torch.no_grad():
        plain = original(logits.detach(), labels, *args, **kwargs)
    return torch.where(known, renormalized(logits, labels, ids).to(plain.dtype), plain)


def _stop(problem: str) -> PatchError:
    return PatchError(
        f"cannot renormalize over the rollout's kept tokens: {problem}.",
        **patches.at(prepare_model_outputs),
        advice="Set fp8's option support=0 to train with log-probabilities over the whole vocabulary.",
    )
