"""Renormalize the FSDP actor's log-probabilities over the tokens that the rollout kept."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any, NamedTuple

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.support.kept import NO_SET, TOO_MANY, renormalized
from flashpatch.patches.fp8.verl.support.agent_loop import FIELD
from flashpatch.record import Contract, Patch

IMPL = "verl.workers.engine.fsdp.transformer_impl"
ID = "fp8.verl.prepare_model_outputs"
TARGET = f"{IMPL}:FSDPEngineWithLMHead.prepare_model_outputs"
OFF = "Set fp8's option support=0 to train with log-probabilities over the whole vocabulary."


class Rows(NamedTuple):
    """Hold what a micro-batch's tokens were drawn from.

    Attributes:
        ids: ``(packed tokens, width)``; a row has the kept ids of the token that follows.
        part, parts: which of how many equal parts of the rows this rank has.
        used: has an entry once log-probabilities were computed from them.
    """

    ids: Any
    part: int
    parts: int
    used: list[bool]


_ROWS: ContextVar[Rows | None] = ContextVar("flashpatch_kept_rows", default=None)


def on_outputs(
    original, self, output: Any, output_args: Any, micro_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``FSDPEngineWithLMHead.prepare_model_outputs``: give `on_logprobs` the kept ids of this micro-batch.

    Raises:
        PatchError: a token to train on has no kept ids, or they were not used.
    """
    if FIELD not in micro_batch.keys():
        return original(self, output, output_args, micro_batch, *args, **kwargs)
    part, parts = 0, 1
    if self.use_ulysses_sp:
        from torch import distributed

        group = self.ulysses_parallel_group
        part, parts = distributed.get_rank(group), distributed.get_world_size(group)
    rows = Rows(packed(micro_batch), part, parts, [])
    token = _ROWS.set(rows)
    try:
        result = original(self, output, output_args, micro_batch, *args, **kwargs)
    finally:
        _ROWS.reset(token)
    if not rows.used:
        raise _stop("log-probabilities were computed without them, for example by fused kernels")
    return result


def on_logprobs(original, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``logprobs_from_logits``: over the kept ids if they are known; over all, without gradient, for other tokens,
    which verl's losses mask.

    Raises:
        PatchError: a token is not among those that it was drawn from.
    """
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


def packed(micro_batch: Any) -> Any:
    """Return the kept ids in the order of the model's tokens, ``(packed tokens, width)``, `NO_SET` where there are none.

    Args:
        micro_batch: what ``prepare_model_outputs`` gets; its ``input_ids`` are jagged.

    Raises:
        PatchError: a token to train on has none, or more than are carried.
    """
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
            patch=ID,
            target=TARGET,
            advice="Raise fp8's option support, twice top_k is plenty, or lower actor_rollout_ref.rollout.top_k.",
        )


def _lengths(micro_batch: Any) -> list[int]:
    """Return the prompts' lengths."""
    prompts = micro_batch["prompts"]
    if prompts.is_nested:
        return prompts.offsets().diff().tolist()
    return micro_batch["attention_mask"][:, : prompts.shape[1]].sum(1).tolist()


def _stop(problem: str) -> PatchError:
    return PatchError(
        f"cannot renormalize over the rollout's kept tokens: {problem}.", patch=ID, target=TARGET, advice=OFF
    )


_patch = functools.partial(
    Patch,
    requires="verl>=0.9",
    evidence="optional",
    when="support!=0 anywhere=fp8.verl.validate_config_correction",
    scope=frozenset({"trainer"}),
    why="Under top-p, top-k or min-p tokens are drawn from the kept ones, and the trainer's probabilities are over all: "
    "each ratio is off by the kept mass, and the gradient is that of another policy.",
    remove_when="verl renormalizes over sampling masks.",
)

OUTPUTS = _patch(
    id=ID,
    targets=(TARGET,),
    wrapper=on_outputs,
    contract=Contract(
        params=("self", "output", "output_args", "micro_batch"),
        mentions=("logprobs_from_logits", "input_ids.offsets"),
        exists=("verl.utils.ulysses:ulysses_pad_and_slice_inputs",),
    ),
    how="With the option support, lines up the kept ids of the micro-batch with its packed tokens, or this rank's part.",
)

LOGPROBS = _patch(
    id="fp8.verl.logprobs_from_logits",
    targets=("verl.utils.torch_functional:logprobs_from_logits",),
    wrapper=on_logprobs,
    contract=Contract(params=("logits", "labels")),
    how="Takes the log-probability of a sampled token over its kept ids, in value and gradient.",
)
