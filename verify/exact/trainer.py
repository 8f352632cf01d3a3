"""Compute the trainer's model as trainers do, one way at a time, and measure what is left of the gap to the engine."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from flashpatch.verify.exact.causes import OTHERS
from flashpatch.verify.exact.certificate import Cause, Certificate, because
from flashpatch.verify.exact.compare import compare, kept_kl, logits, mean_kl
from flashpatch.verify.exact.engine import Pass
from flashpatch.verify.exact.forced import router_logits
from flashpatch.verify.exact.routers import choosing
from flashpatch.verify.exact.verl_job import Trainer

PADS = 8
"""Tokens of padding before the prompt."""


def certified(
    model: str, trusted: bool, ids: list[int], engine: bytes, trainer: Trainer | None
) -> Certificate:
    """Compare a pickled `Pass` of an engine with the trainer's model, in a process in which no engine was: vLLM changes classes
    of transformers. ``trusted``: the checkpoint's own code may run. For the others see `command.certify`."""
    from transformers import AutoModelForCausalLM

    # torch's own attention, the default, leaves caps on scores away.
    eager = {"attn_implementation": "eager", "trust_remote_code": trusted}

    def load(dtype: torch.dtype) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **eager).eval()

    seen = pickle.loads(engine)
    found = compare(load, ids, seen)
    if trainer is None or found.problem:
        return found
    return replace(found, causes=measured(load, ids, seen, trainer))


def measured(
    load: Callable[[torch.dtype], torch.nn.Module], ids: list[int], engine: Pass, trainer: Trainer
) -> tuple[Cause, ...]:
    """Return what a trainer does to its model's numbers, each with the gap that is left to what the engine did.

    ``load`` returns the Hugging Face model in a dtype, with eager attention, in evaluation mode."""
    small = load(torch.bfloat16)
    in_bf16 = logits(small, ids)
    del small  # one model in memory at a time
    exact = load(torch.float32)
    wanted = logits(exact, ids)
    gap = mean_kl(wanted, engine.logits)

    def cause(
        name: str, to: str, compute: Callable[[], torch.Tensor], kl: Callable[..., float] = mean_kl
    ) -> Cause:
        try:
            left = kl(compute(), engine.logits)
        except Exception as error:  # of a model's own code, which does not take every batch
            return Cause(name, to, problem=because(error))
        return Cause(name, to, left, 1 - left / max(gap, 1e-30))

    def routed() -> torch.Tensor:
        with choosing(exact, routers, later=False):
            return logits(exact, ids)

    found = [cause("trainer's dtype", "bfloat16", lambda: in_bf16)]
    if routers := router_logits(exact, len(ids), engine.calls):
        found.append(cause("routing", "by the logits of the engine's routers", routed))
    found += [cause(*way) for way in batches(exact, ids)]
    if trainer.top_p < 1 or trainer.top_k > 0:
        over = f"top_p {trainer.top_p:g}, top_k {trainer.top_k}; the trainer's over all tokens"
        cut = partial(kept_kl, top_p=trainer.top_p, top_k=trainer.top_k)
        found.append(cause("truncated sampling", over, lambda: wanted, cut))
    return tuple(found)


def batches(model: torch.nn.Module, ids: list[int]) -> Iterator[tuple[str, str, Callable[[], torch.Tensor]]]:
    """Yield ways in which trainers give a model, with eager attention, a sequence among others: what is switched, how, and what then
    gives the model's logits."""
    length, device = len(ids), next(model.parameters()).device
    row = torch.tensor(ids, device=device)

    def forward(at: int, begin: int, **batch: torch.Tensor | None) -> torch.Tensor:
        """The logits of the sequence that begins at ``begin`` in row ``at``."""
        with torch.no_grad():
            found = model(use_cache=False, **batch).logits
        return found[at, begin : begin + length - 1].float().cpu()

    def attention() -> torch.Tensor:
        model.set_attn_implementation("sdpa")
        try:
            return forward(0, 0, input_ids=row[None])
        finally:
            model.set_attn_implementation("eager")

    def padded(positions: bool) -> torch.Tensor:
        mask = torch.ones(2, PADS + length, dtype=torch.long, device=device)
        mask[0, :PADS] = 0
        rows = torch.stack([torch.cat([row.new_zeros(PADS), row]), torch.cat([row[:PADS], row.roll(-1)])])
        counted = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else {}
        return forward(0, PADS, input_ids=rows, attention_mask=mask, **counted)

    def packed() -> torch.Tensor:
        sequences = [row.roll(-1), row, *(row.roll(-at) for at in range(2, 1 + OTHERS))]
        positions = torch.arange(length, device=device).repeat(len(sequences))[None]
        inputs = torch.cat(sequences)[None]
        return forward(0, length, input_ids=inputs, attention_mask=None, position_ids=positions)

    yield "trainer's attention", "sdpa, transformers' default", attention
    yield "padding", f"{PADS} tokens before it, beside a longer row", lambda: padded(True)
    yield "position ids", "none given, under that padding", lambda: padded(False)
    yield "remove padding", f"packed with {OTHERS} others in one row", packed
