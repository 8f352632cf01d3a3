"""Train a policy by a method and measure it against its target as it goes."""

from __future__ import annotations

from dataclasses import dataclass, field

import measures
import torch
from methods import Method, Samples, loss
from worlds import World

POINTS = 15  # measurements of a run

MEASURES = ("reward", "effective", "variation", "divergence", "nearest", "nearest_beta")


@dataclass
class Run:
    """What a run measured: per measure a tensor ``(points, S)``, and the steps they were taken after."""

    method: Method
    steps: list[int] = field(default_factory=list)
    measured: dict[str, list[torch.Tensor]] = field(default_factory=lambda: {name: [] for name in MEASURES})

    def add(self, step: int, policy: torch.Tensor, world: World, target: torch.Tensor) -> None:
        """Measure a policy, ``(S, P, N)``."""
        nearest, beta = measures.nearest(policy, world)
        found = (
            (policy * world.reward).sum(-1).mean(-1),
            measures.effective_number(policy, world.right),
            measures.total_variation(policy, target),
            measures.divergence(policy, target),
            nearest,
            beta,
        )
        self.steps.append(step)
        for name, value in zip(MEASURES, found, strict=True):
            self.measured[name].append(value)

    def curve(self, name: str) -> torch.Tensor:
        return torch.stack(self.measured[name])


def train(world: World, policy, method: Method, steps: int, seed: int = 0) -> Run:
    """Train ``policy`` on sampled answers to every prompt and step.

    Args:
        policy: as `policies.Table`; all its seeds are trained, each on samples of its own.
        steps: to be multiplied by the method's.
    """
    draw = torch.Generator().manual_seed(seed)
    own, partition = policy.parameters()
    groups = [{"params": own, "lr": method.rate}, {"params": partition, "lr": method.rate * method.z_rate}]
    optimizer = getattr(torch.optim, method.optimizer)(groups)
    target = method.target(world)
    exact = world.log_z(method.beta, method.length)
    run, steps = Run(method), round(steps * method.steps)
    every = max(1, steps // POINTS)
    for step in range(steps + 1):
        with torch.no_grad():
            tokens = policy.answers()[0]
            whole = tokens.sum(-1).exp()
        if step % every == 0:
            run.add(step, whole.double(), world, target)
        if step == steps:
            return run
        seeds, prompts, answers = whole.shape
        which = torch.multinomial(whole.view(-1, answers), method.samples, replacement=True, generator=draw)
        which = which.view(seeds, prompts, -1)
        samples = sampled(world, tokens, which, exact)
        for _ in range(method.updates):
            optimizer.zero_grad()
            loss(method, samples, *policy.chosen(which), policy.log_z()).sum().backward()
            optimizer.step()
    return run


def sampled(world: World, tokens: torch.Tensor, which: torch.Tensor, exact: torch.Tensor) -> Samples:
    """Look up sampled answers ``which``, ``(S, P, G)``, in ``tokens``, their policy's log-probabilities."""
    at = which[..., None].expand(*which.shape, tokens.shape[-1])
    kind = tokens.dtype
    reference = world.reference.to(kind).expand(len(tokens), *world.reference.shape)
    rewards = world.reward.to(kind).expand(len(tokens), *world.reward.shape)
    return Samples(
        tokens.gather(2, at),
        reference.gather(2, at),
        world.mask[which],
        rewards.gather(2, which),
        exact.to(kind),
    )
