"""Policies over a world's answers: tables, one per seed, trained together as one tensor. ``S`` seeds."""

from __future__ import annotations

import torch
from worlds import STRINGS, World


class Table:
    """A logit per answer, ``(S, P, N)``; it starts as the reference. ``log_z`` is a number per seed and prompt.

    The logarithm of an answer's probability is spread evenly over its tokens, so all must have equally many.
    """

    def __init__(self, world: World, seeds: int) -> None:
        start = world.reference.sum(-1)
        self.mask = world.mask
        self.logits = start.expand(seeds, *start.shape).clone().requires_grad_()
        self.log_z_table = torch.zeros(seeds, len(start), dtype=start.dtype, requires_grad=True)

    def parameters(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The policy's, and the partition function's."""
        return [self.logits], [self.log_z_table]

    def answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy at each token of every answer, both ``(S, P, N, T)``."""
        tokens = self.mask.shape[1]
        log_prob = self.logits.log_softmax(-1)
        entropy = -(log_prob.exp() * log_prob).sum(-1, keepdim=True).expand_as(log_prob)
        return tuple((part / tokens)[..., None].expand(*part.shape, tokens) for part in (log_prob, entropy))

    def chosen(self, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for answers ``which``, ``(S, P, G)`` to ``(S, P, G, T)``."""
        at = which[..., None].expand(*which.shape, self.mask.shape[1])
        return tuple(part.gather(2, at) for part in self.answers())

    def log_z(self) -> torch.Tensor:
        """``(S, P)``."""
        return self.log_z_table


class Tree(Table):
    """An autoregressive policy over `worlds.STRINGS`: three logits (a, b, end) after each beginning.

    ``(S, P, beginnings, 3)``; an empty string cannot end, and one of full length must.
    """

    def __init__(self, world: World, seeds: int) -> None:
        super().__init__(world, seeds)
        longest = world.mask.shape[1] - 1
        beginnings = {text: at for at, text in enumerate(["", *STRINGS])}
        self.node = torch.zeros(world.mask.shape, dtype=torch.long)
        self.symbol = torch.zeros_like(self.node)
        for at, text in enumerate(STRINGS):
            for place in range(len(text) + 1):
                self.node[at, place] = beginnings[text[:place]]
                self.symbol[at, place] = "ab".index(text[place]) if place < len(text) else 2
        allowed = torch.ones(len(beginnings), 3, dtype=torch.bool)
        allowed[0, 2] = False
        allowed[[at for text, at in beginnings.items() if len(text) == longest], :2] = False
        self.forbidden = torch.where(allowed, 0.0, -torch.inf).to(world.reference.dtype)
        start = torch.zeros(1, len(beginnings), 3, dtype=world.reference.dtype)
        start[:, self.node[world.mask], self.symbol[world.mask]] = world.reference[:, world.mask]
        self.logits = start.expand(seeds, *start.shape).clone().requires_grad_()

    def answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        log_prob = (self.logits + self.forbidden).log_softmax(-1)
        finite = log_prob.clamp(min=-1e4)  # 0 times -inf is not a number
        entropy = -(finite.exp() * finite).sum(-1)
        taken = log_prob[:, :, self.node, self.symbol]
        return torch.where(self.mask, taken, 0.0), torch.where(self.mask, entropy[:, :, self.node], 0.0)
