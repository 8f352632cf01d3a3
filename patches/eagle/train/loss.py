"""Compute a drafter's loss: towards the target's states, and towards the distributions of the target's head.

EAGLE's objective (arXiv 2401.15077, section 4.2): SmoothL1 between states plus cross entropy between the
distributions that the frozen head gives for both. A drafter of a smaller vocabulary learns, as EAGLE-3's published ones,
the target's distribution over that vocabulary, scaled to sum 1, where the target's first choice is in it; elsewhere
nothing, and its draft counts as wrong."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flashpatch.patches.eagle.train.drafter import Drafter
from flashpatch.patches.eagle.train.pack import Pack
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings

CHUNK = 1024
"""Positions whose logits are in memory at a time."""


class Sums(NamedTuple):
    """Hold sums over the positions to learn from; divide by their number over all rows.

    Attributes:
        states: SmoothL1 per position, the mean over the width; zero for EAGLE-3, whose states are its own.
        tokens: soft cross entropy per position.
        agreed: positions where both distributions have the same highest token."""

    states: Tensor
    tokens: Tensor
    agreed: Tensor


def step_sums(drafter: Drafter, target_embeddings: TargetEmbeddings, pack: Pack, steps: int) -> list[Sums]:
    """Run a drafter over a row for several draft steps, and sum its losses at each."""
    embedded = target_embeddings.embed(pack.next_ids)[None].to(pack.states.dtype)
    every = drafter(pack.states[None], embedded, pack.positions[None], pack.mask(), steps=steps)
    found = []
    for step, predicted in enumerate(every):
        rows = pack.learn_at(step).nonzero()[:, 0]
        found.append(_sums(predicted[rows], pack.targets[rows + step], drafter, target_embeddings))
    return found


def _sums(predicted: Tensor, targets: Tensor, drafter: Drafter, target_embeddings: TargetEmbeddings) -> Sums:
    regress = drafter.config.eagle_kind == "eagle"
    # Multiplying by zero keeps the graph of a row from which nothing is learned.
    states = F.smooth_l1_loss(predicted, targets, reduction="none").mean(-1).sum() * (1.0 if regress else 0.0)
    tokens, agreed = predicted.sum() * 0.0, torch.zeros((), device=predicted.device)
    for start in range(0, len(targets), CHUNK):
        one, two = predicted[start : start + CHUNK], targets[start : start + CHUNK]
        part, same = checkpoint(_cross_entropy, one, two, drafter, target_embeddings, use_reentrant=False)
        tokens, agreed = tokens + part, agreed + same
    return Sums(states, tokens, agreed)


def _cross_entropy(
    predicted: Tensor, targets: Tensor, drafter: Drafter, target_embeddings: TargetEmbeddings
) -> tuple[Tensor, Tensor]:
    precise = torch.promote_types(predicted.dtype, torch.float32)
    ours = drafter.logits(predicted, target_embeddings).to(precise)
    with torch.no_grad():
        theirs = target_embeddings.logits(targets).to(precise)
        choice, drafted, ids = theirs.argmax(-1), ours.argmax(-1), drafter.vocabulary()
        if ids is not None:
            known, drafted, theirs = torch.isin(choice, ids), ids[drafted], theirs[:, ids]
        same = (choice == drafted).sum()
        theirs = theirs.softmax(-1)
        if ids is not None:
            theirs = theirs * known[:, None]
    return -(theirs * ours.log_softmax(-1)).sum(), same
