"""Small worlds in which the distribution that FlowRL aims at, ``p_ref exp(beta r) / Z``, can be written down.

All answers to a prompt are listed, so the policy, the reference and the target are vectors. ``P`` prompts, ``N``
answers each, at most ``T`` tokens per answer.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "verl_flowrl"))

from expressions import ALL, RIGHT  # noqa: E402

TARGETS = tuple(range(2, 10))
LONGEST = 8  # letters
UNBOUNDED = 1e3
"""A beta so large that its target is the reference among the best answers."""


@dataclass(frozen=True)
class World:
    """A reference policy and rewards over listed answers, in float64.

    Attributes:
        reference: log-probability of each token under the reference, ``(P, N, T)``; 0 where there is none.
        mask: true for the tokens of each answer, ``(N, T)``.
        reward: ``(P, N)``, from 0 to 1; 1 is a right answer.
    """

    name: str
    reference: torch.Tensor
    mask: torch.Tensor
    reward: torch.Tensor

    @property
    def right(self) -> torch.Tensor:
        return self.reward == 1

    def tilted(self, beta: float) -> torch.Tensor:
        """Return ``p_ref exp(beta r) / Z``, ``(P, N)``."""
        return (self.reference.sum(-1) + beta * self.reward).softmax(-1)

    def log_z(self, beta: float, length: str) -> torch.Tensor:
        """Return the log Z at which every residual of FlowRL's loss can be zero, ``(P,)``.

        With ``length="sum"`` that is the logarithm of the sum of ``p_ref exp(beta r)``. With ``"mean"`` it solves
        ``sum p_ref exp(|y| (beta r - log Z)) = 1``, which falls in log Z, by bisection.
        """
        reference = self.reference.sum(-1)
        if length == "sum":
            return (reference + beta * self.reward).logsumexp(-1)
        tokens = self.mask.sum(-1)
        low, high = (beta * bound for bound in (self.reward.amin(-1), self.reward.amax(-1)))
        for _ in range(100):
            middle = (low + high) / 2
            above = (reference + tokens * (beta * self.reward - middle[:, None])).logsumexp(-1) > 0
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return (low + high) / 2

    def target(self, beta: float, length: str) -> torch.Tensor:
        """Return the policy for which FlowRL's loss on the plain reward is zero, ``(P, N)``."""
        share = self.mask.sum(-1) if length == "mean" else 1
        advantage = beta * self.reward - self.log_z(beta, length)[:, None]
        return (self.reference.sum(-1) + share * advantage).exp()


def expressions(share: float = 0.25, spread: float = 1.0, tokens: int = 4) -> World:
    """The task of ``examples/verl_flowrl``: a sum, difference or product of two digits that gives a number.

    There are 300 answers to each of 8 prompts; 110 of all are right. The reference gives the right ones ``share``
    of its mass, and prefers some of either kind: weights are ``exp(spread * normal)``, drawn once. A policy's
    probability of an answer is a table's entry; its logarithm is spread evenly over ``tokens`` tokens.
    """
    draw = torch.Generator().manual_seed(0)
    right = torch.tensor([[text in RIGHT[target] for text in ALL] for target in TARGETS])
    weights = (spread * torch.randn(right.shape, generator=draw, dtype=torch.float64)).exp()
    parts = [weights * kind / (weights * kind).sum(-1, keepdim=True) for kind in (right, ~right)]
    reference = (share * parts[0] + (1 - share) * parts[1]).log()
    mask = torch.ones(len(ALL), tokens, dtype=torch.bool)
    spelled = (reference / tokens)[..., None].expand(*reference.shape, tokens)
    return World("expressions", spelled.clone(), mask, right.double())


STRINGS = ["".join(s) for n in range(1, LONGEST + 1) for s in itertools.product("ab", repeat=n)]
"""All strings of 1 to `LONGEST` letters, 510; each ends with an end token."""


def strings() -> World:
    """Strings of up to 8 letters, rewarded for how much of them reads the same backwards; 60 are palindromes.

    The reward is graded: the share of mirrored pairs that agree. The reference picks a length from 1 to 8, each as
    likely, then letters, ``a`` twice as often as ``b``. Answers differ in length, so that a mean over tokens and a
    sum aim at different things.
    """
    reference = torch.zeros(1, len(STRINGS), LONGEST + 1, dtype=torch.float64)
    mask = torch.zeros(len(STRINGS), LONGEST + 1, dtype=torch.bool)
    for at, text in enumerate(STRINGS):
        mask[at, : len(text) + 1] = True
        for place, letter in enumerate(text):
            going_on = (LONGEST - place) / (LONGEST - place + 1) if place else 1.0
            reference[0, at, place] = torch.tensor(going_on * {"a": 2, "b": 1}[letter] / 3).log()
        if len(text) < LONGEST:
            reference[0, at, len(text)] = torch.tensor(1 / (LONGEST - len(text) + 1)).log()
    rewards = [mirrored(text) for text in STRINGS]
    return World("strings", reference, mask, torch.tensor([rewards], dtype=torch.float64))


def mirrored(text: str) -> float:
    """The share of letters that equal their mirror image, the middle one included."""
    return sum(a == b for a, b in zip(text, reversed(text), strict=True)) / len(text)
