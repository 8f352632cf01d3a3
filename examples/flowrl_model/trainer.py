"""Teach a language model the task, train it by a method of ``flowrl_exact``, and measure its answers."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from answers import mean_over, measured
from language_model import LanguageModel
from task import HELD_OUT, TARGETS, TRAINED, some_right, value

from flashpatch.patches.flowrl.partition_function import PartitionFunction

sys.path.append(str(Path(__file__).resolve().parents[1] / "flowrl_exact"))

from methods import Method, Samples, loss  # noqa: E402

PROMPTS = 8  # of a step
CLIP_NORM = 1.0


def teach(checkpoint: Path, to: Path, enough: float, lessons: int = 200, rate: float = 2e-4) -> None:
    """Show a model right answers, each as likely as any other, until ``enough`` of its own are right."""
    torch.manual_seed(0)
    draw, model = random.Random(0), LanguageModel(checkpoint)
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=rate, weight_decay=0.0)
    began = time.monotonic()
    for lesson in range(1, lessons + 1):
        targets = draw.sample(TARGETS, 16)
        answers = model.written([some_right(target, 8, draw) for target in targets])
        log_prob, mask = model.log_prob(model.asked(targets), answers)[0], model.mask(answers)
        objective = -(log_prob * mask).sum() / mask.sum()
        _step(optimizer, objective)
        if lesson % 10 == 0:
            share = evaluate(model, TARGETS, 16, seed=lesson)["reward"]
            seconds = time.monotonic() - began
            print(
                f"lesson {lesson}: loss {objective.item():.3f}, {share:.0%} right, {seconds:.0f} s",
                flush=True,
            )
            if share >= enough:
                break
    model.model.save_pretrained(to)
    model.words.save_pretrained(to)


def evaluate(model: LanguageModel, targets: tuple[int, ...], samples: int, seed: int) -> dict[str, float]:
    """Measure answers to each target; the mean over targets. The same seed draws the same way for every model."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for at in range(0, len(targets), PROMPTS):
        some = list(targets[at : at + PROMPTS])
        texts = model.read(model.sample(model.asked(some), samples, draw))
        found += [
            measured(group, [value(text) == target for text in group])
            for target, group in zip(some, texts, strict=True)
        ]
    return mean_over(found)


def train(
    checkpoint: Path, method: Method, seed: int, steps: int, every: int = 10, samples: int = 64
) -> dict[str, Any]:
    """Train by ``method`` and return what was measured.

    Returns:
        ``curve``: measures of the held-out targets every so many steps, with ``samples`` answers to each; ``held_out`` and
        ``trained``: those at the end with twice as many; ``loss``, ``log_z`` and ``train_reward`` per step; ``seconds``.
    """
    torch.manual_seed(seed)
    draw, choose = torch.Generator().manual_seed(seed), random.Random(seed)
    model, reference = LanguageModel(checkpoint), LanguageModel(checkpoint)
    reference.model.requires_grad_(False)
    partition = PartitionFunction(model.model.config.hidden_size, 3, 0.0)
    groups = [
        {"params": list(model.model.parameters()), "lr": method.rate},
        {"params": list(partition.parameters()), "lr": method.rate * method.z_rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    run: dict[str, Any] = {"curve": [], "loss": [], "log_z": [], "train_reward": []}
    began = time.monotonic()
    for step in range(steps + 1):
        if step % every == 0:
            run["curve"].append({"step": step, **evaluate(model, HELD_OUT, samples, seed)})
        if step == steps:
            break
        targets = choose.sample(TRAINED, PROMPTS)
        prompts = model.asked(targets)
        answers = model.sample(prompts, method.samples, draw)
        reward = _rewards(model, answers, targets)
        log_prob, means = model.log_prob(prompts, answers)
        with torch.no_grad():
            known = reference.log_prob(prompts, answers)[0]
        log_z = partition(means)
        kept = Samples(
            log_prob.detach()[None],
            known[None],
            model.mask(answers)[None],
            reward[None],
            torch.zeros(PROMPTS),
        )
        entropy = torch.zeros_like(log_prob)[None]
        objective = loss(method, kept, log_prob[None], entropy, log_z[None])[0]
        _step(optimizer, objective)
        for name, number in {"loss": objective, "log_z": log_z.mean(), "train_reward": reward.mean()}.items():
            run[name].append(float(number.detach()))
    run["held_out"] = evaluate(model, HELD_OUT, 2 * samples, seed + 1)
    run["trained"] = evaluate(model, TRAINED[::3], 2 * samples, seed + 1)
    run["seconds"] = time.monotonic() - began
    return run


def _rewards(model: LanguageModel, answers: torch.Tensor, targets: list[int]) -> torch.Tensor:
    texts = model.read(answers)
    rows = [
        [float(value(text) == target) for text in group] for target, group in zip(targets, texts, strict=True)
    ]
    return torch.tensor(rows)


def _step(optimizer: torch.optim.Optimizer, objective: torch.Tensor) -> None:
    optimizer.zero_grad()
    objective.backward()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], CLIP_NORM)
    optimizer.step()
