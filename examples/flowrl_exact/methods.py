"""Ways to train a policy on rewards of sampled answers. FlowRL's loss and log Z are the package's own.

Tensors are ``(S, P, G)`` per response (seeds, prompts, responses of a group) and ``(S, P, G, T)`` per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from worlds import UNBOUNDED, World

from flashpatch.patches.flowrl.objective import balance, group_log_z

CLIP = 0.2


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        kind: ``flowrl``, ``grpo``, or ``reinforce`` with the KL from the reference in the reward.
        rate: the optimizer's.
        beta, length, weight: FlowRL's options; ``reinforce`` has the KL coefficient ``1 / beta``.
        log_z: ``learned``, ``exact`` (the world's), ``group`` (the package's estimate from a
            group), or ``mean`` (the group's mean, which is what a learned log Z tends to).
        z_rate: the partition function's learning rate, as a multiple of ``rate``.
        reward: ``normalised`` in the group as GRPO does, ``centred`` (less the group's mean), or ``raw``.
        entropy, kl: GRPO's coefficients of the entropy and of verl's ``low_var_kl``.
        updates: on the same samples; with one, the importance weights are 1.
        samples: responses to a prompt and step.
        steps: multiple of the experiment's steps.
        optimizer: ``Adam`` or ``SGD``.
    """

    name: str
    kind: str = "flowrl"
    rate: float = 0.03
    beta: float = 5.0
    length: str = "mean"
    weight: str = "clip"
    log_z: str = "learned"
    z_rate: float = 1.0
    reward: str = "normalised"
    entropy: float = 0.0
    kl: float = 0.0
    updates: int = 1
    samples: int = 8
    steps: float = 1.0
    optimizer: str = "Adam"

    def target(self, world: World) -> torch.Tensor:
        """Return where this method should end on the plain reward, ``(P, N)``; GRPO has no such place, and is
        measured against the reference among right answers."""
        if self.kind == "flowrl":
            return world.target(self.beta, self.length)
        return world.tilted(self.beta if self.kind == "reinforce" else UNBOUNDED)


@dataclass(frozen=True)
class Samples:
    """What a loss needs of sampled responses.

    Attributes:
        old, reference: log-probabilities of tokens under the policy that sampled them, and the reference.
        mask: of tokens.
        reward: of responses.
        exact_log_z: of prompts, ``(P,)``.
    """

    old: torch.Tensor
    reference: torch.Tensor
    mask: torch.Tensor
    reward: torch.Tensor
    exact_log_z: torch.Tensor


def shaped(reward: torch.Tensor, how: str) -> torch.Tensor:
    """Return the reward as the loss gets it; ``normalised`` and ``centred`` as verl's ``grpo`` computes them."""
    if how == "raw":
        return reward
    centred = reward - reward.mean(-1, keepdim=True)
    return centred if how == "centred" else centred / (reward.std(-1, keepdim=True) + 1e-6)


def loss(
    method: Method, samples: Samples, log_prob: torch.Tensor, entropy: torch.Tensor, log_z: torch.Tensor
) -> torch.Tensor:
    """Return each seed's loss, ``(S,)``.

    Args:
        log_prob, entropy: of tokens under the policy that learns.
        log_z: learned, ``(S, P)``.
    """
    function = {"flowrl": _flowrl, "grpo": _grpo, "reinforce": _reinforce}[method.kind]
    return function(method, samples, log_prob, entropy, log_z)


def _flowrl(method, samples, log_prob, entropy, log_z):
    shape, tokens = samples.reward.shape, log_prob.shape[-1]
    reward = shaped(samples.reward, method.reward)[..., None].expand(log_prob.shape)
    old, reference, reward, mask = (
        part.reshape(-1, tokens) for part in (samples.old, samples.reference, reward, samples.mask)
    )
    choices = {"beta": method.beta, "length": method.length}
    if method.log_z == "group":
        groups = torch.arange(shape[0] * shape[1]).repeat_interleave(shape[2])
        z = group_log_z(old, reference, reward, mask, groups, **choices)
    elif method.log_z == "mean":
        z = _mean_log_z(old, reference, reward, mask, **choices).view(shape).mean(-1, keepdim=True)
        z = z.expand(shape).reshape(-1)
    else:
        z = log_z if method.log_z == "learned" else samples.exact_log_z.expand(shape[:2])
        z = z[..., None].expand(shape).reshape(-1)
    parts = balance(
        z,
        log_prob.reshape(-1, tokens),
        old,
        reference,
        reward,
        mask,
        weight=method.weight,
        low=CLIP,
        high=CLIP,
        cap=None,
        **choices,
    )
    return parts.loss.view(shape[0], -1).mean(1)


def _mean_log_z(old, reference, reward, mask, beta, length):
    """What each response alone would take log Z for; a learned log Z tends to the mean, known as VarGrad's."""
    zero = torch.zeros(len(old), dtype=old.dtype)
    choices = {"weight": "none", "low": CLIP, "high": CLIP, "cap": None}
    return -balance(zero, old, old, reference, reward, mask, beta=beta, length=length, **choices).residual


def _clipped(log_prob, samples, advantage):
    """PPO's clipped surrogate per token, to be minimised."""
    ratio = (log_prob - samples.old).exp()
    bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantage[..., None], bounded * advantage[..., None])


def _token_mean(values, mask):
    return (values * mask).flatten(1).sum(1) / mask.flatten(1).sum(1)


def _grpo(method, samples, log_prob, entropy, log_z):
    values = _clipped(log_prob, samples, shaped(samples.reward, method.reward)) - method.entropy * entropy
    if method.kl:
        away = samples.reference - log_prob
        values = values + method.kl * (away.exp() - away - 1)
    return _token_mean(values, samples.mask)


def _reinforce(method, samples, log_prob, entropy, log_z):
    away = ((samples.old - samples.reference) * samples.mask).sum(-1)
    advantage = shaped(samples.reward - away / method.beta, "centred")
    return (_clipped(log_prob, samples, advantage) * samples.mask).sum(-1).flatten(1).mean(1)
