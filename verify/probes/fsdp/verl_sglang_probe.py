"""Probe family fsdp if verl's rollouts are SGLang's: verl's server answers with what two ranks sent it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashpatch.proof import Proof
from flashpatch.verify import processes, verl_sglang_server
from flashpatch.verify.probes.fsdp import job, verl_sglang_job
from flashpatch.verify.probes.fsdp.verl_probe import VICTIM
from flashpatch.verify.processes import Command

TIMEOUT = 600.0  # seconds
PLAN = [
    {"strategy": "fsdp2", "step": True},
    {"strategy": "fsdp2", "tamper": "bit", "victim": VICTIM},
    {"strategy": "fsdp", "step": True},
    {"strategy": "fsdp", "tamper": "bit", "victim": VICTIM},
]
_CLOSE = 1e-3  # of log-probabilities, against a forward


def probe(workdir: Path) -> Iterator[Proof]:
    """Send under both FSDPs, unharmed and with one bit flipped. On a CPU only: with an accelerator that is said."""
    from flashpatch.patches.cpu import platform

    if (found := platform.accelerator()) is not None:
        why = f"not probed beside {found}: run a job, and ask flashpatch-verify --live"
        yield Proof("fsdp", "two ranks send to verl's SGLang server", False, why)
        return
    model = workdir / "model"
    job.make_model(model, hidden_size=64)
    verl_sglang_server.write_tokenizer(model, job.VOCABULARY + 1)
    (workdir / "plan.json").write_text(json.dumps(PLAN))
    commands = [
        Command(f"rank-{rank}", processes.entry_point(verl_sglang_job.__name__, workdir), environment)
        for rank, environment in enumerate(processes.rank_environments(workdir, 2))
    ]
    began = time.monotonic()
    ended = processes.problems(processes.run(commands, workdir, TIMEOUT))
    path = workdir / verl_sglang_job.SEEN
    seen = json.loads(path.read_text()) if path.exists() else {}
    yield from weigh(seen, ended, log_probabilities(model, seen), time.monotonic() - began)


def log_probabilities(model: Path, seen: Mapping[str, Any]) -> list[list[float]]:
    """Return, per prompt, those that one process's weights after the same step give to the server's last tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    answers = [saw["answers"] for saw in seen.get("transfers", ()) if "answers" in saw]
    if not answers:
        return []
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained.load_state_dict(job.plain_step(model))
    found = []
    for prompt, answer in zip(verl_sglang_job.PROMPTS, answers[-1], strict=True):
        tokens = [int(token) for token in answer[: len(answer) // 2]]
        with torch.no_grad():
            logits = trained(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1)[range(len(tokens)), tokens].tolist())
    return found


def weigh(
    seen: Mapping[str, Any], ended: str, wanted: list[list[float]], seconds: float = 0.0
) -> Iterator[Proof]:
    """Judge what rank 0 saw; ``wanted``: see `log_probabilities`."""
    problem, transfers = seen.get("failed") or ended, seen.get("transfers", [])
    if problem or len(transfers) < len(PLAN):
        what = "two ranks send to verl's SGLang server"
        yield Proof("fsdp", what, False, problem or f"{len(transfers)} of {len(PLAN)} transfers", seconds)
        return
    for entry, saw in zip(PLAN, transfers, strict=True):
        error = saw["error"]
        if entry.get("tamper"):
            what = (
                f"one bit flipped in the gathered tensor is named by SGLang's scheduler ({entry['strategy']})"
            )
            named = error[max(0, error.rfind("[flashpatch")) :]  # the scheduler's error, within the client's
            yield Proof("fsdp", what, VICTIM in error, named[:240] or "it was loaded")
            continue
        pairs = [
            (got, want)
            for answer, wants in zip(saw["answers"], wanted, strict=True)
            for got, want in zip(answer[len(answer) // 2 :], wants, strict=True)
        ]
        worst = max((abs(got - want) for got, want in pairs), default=1.0)
        changed = saw["answers"] != seen["before"]
        what = f"after a step, SGLang answers as one process's weights would ({entry['strategy']})"
        detail = (
            error or f"log-probabilities differ by {worst:.1e} at most; {'' if changed else 'not '}changed"
        )
        yield Proof("fsdp", what, not error and changed and worst < _CLOSE, detail, seconds)
        seconds = 0.0
