"""Distances between a policy and a target, and how many right answers a policy still gives; all exact."""

from __future__ import annotations

import torch
from worlds import World


def total_variation(policy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half the sum of absolute differences, ``(..., P, N)`` to ``(...)``, averaged over prompts."""
    return (policy - target).abs().sum(-1).mean(-1) / 2


def divergence(policy: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL of the policy from the target in nats, averaged over prompts; a target of 0 counts as 1e-300."""
    ratio = policy.clamp(min=1e-300).log() - target.clamp(min=1e-300).log()
    return (policy * ratio).sum(-1).mean(-1)


def effective_number(policy: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``exp`` of the entropy among right answers, averaged over prompts."""
    among = policy * right
    among = among / among.sum(-1, keepdim=True).clamp(min=1e-300)
    return (-(among * among.clamp(min=1e-300).log()).sum(-1)).exp().mean(-1)


def nearest(policy: torch.Tensor, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """The least total variation to ``p_ref exp(b r) / Z`` over all ``b``, and that ``b``.

    It tells a target of another temperature, at which this is small, from answers lost.
    """
    betas = [0.0, *torch.logspace(-1, 2.5, 22).tolist(), 1e3]
    distances = torch.stack([total_variation(policy, world.tilted(beta)) for beta in betas])
    least = distances.min(0)
    return least.values, torch.tensor(betas)[least.indices]
