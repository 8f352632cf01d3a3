"""Probe family fsdp: verl's FSDP engines send to verl's receivers, unharmed and with a fault in transit.

If verl's rollouts are SGLang's, verl's server answers with what two ranks sent it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flashpatch.verify import verl_sglang_server
from flashpatch.verify.probes import calls, jobs
from flashpatch.verify.proof import Proof

_proof = partial(Proof, "fsdp")
TIMEOUT = 600.0  # seconds for all processes together
_CLOSE = 1e-5  # of weights after one step, against one process's
_CLOSE_LOGPROBS = 1e-3  # against a forward

VICTIM = "model.layers.1.mlp.down_proj.weight"
PLAN: list[dict[str, Any]] = [
    {"strategy": "fsdp2", "step": True},
    {"strategy": "fsdp2", "tamper": "bit", "victim": VICTIM},
    {"strategy": "fsdp2", "fsdp_size": 1, "step": True},
    {"strategy": "fsdp", "step": True},
    {"strategy": "fsdp", "tamper": "buffer", "victim": VICTIM},
    {"strategy": "fsdp", "fsdp_size": 1, "step": True},
]
ON_SGLANG: list[dict[str, Any]] = [
    {"strategy": strategy, **entry}
    for strategy in ("fsdp2", "fsdp")
    for entry in ({"step": True}, {"tamper": "bit", "victim": VICTIM})
]


def run(workdir: Path, plan: list[dict[str, Any]], function: str = "rank", **extra: str) -> jobs.Outcome:
    """Carry out a plan of `flashpatch.verify.probes.fsdp.job`, one entry per transfer, on two ranks and the model in ``model``."""
    (workdir / "plan.json").write_text(json.dumps(plan))
    return jobs.run(jobs.ranks(f"fsdp.job:{function}", workdir, environment=extra), workdir, TIMEOUT)


def report(workdir: Path, part: str, rank: int) -> list[dict[str, Any]]:
    """What one side of one rank saw, by entry of the plan."""
    return json.loads((workdir / f"{part}-{rank}.json").read_text())


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Send from two ranks under both FSDPs and both meshes; flip one bit under each FSDP."""
    if jobs.engine_here() == "sglang":
        return list(_on_sglang(workdir))
    from flashpatch.verify.probes.fsdp import job

    job.make_model(workdir / "model")
    ended = run(workdir, PLAN)
    if ended.problem:
        return [_proof("two ranks send to two rollout workers", False, ended.problem, ended.seconds)]
    return [
        *_weigh(workdir, job.plain_step(workdir / "model"), ended.seconds),
        calls.counted(nonce, "fsdp.verl", {"trainer": ("get_per_tensor_param", "get_sharding_strategy")}),
        calls.counted(nonce, "fsdp.verl_vllm", {"worker": ("receive_weights",)}),
    ]


def _weigh(workdir: Path, wanted: dict[str, Any], seconds: float) -> list[Proof]:
    """Judge what the rollout workers received; ``wanted`` are one process's weights after the same step."""
    import torch

    sides = [report(workdir, "rollout", rank) for rank in range(2)]
    proofs = []
    for number, entry in enumerate(PLAN):
        errors = [side[number]["error"] for side in sides]
        committed = [side[number]["committed"] for side in sides]
        mesh = f"{entry['strategy']}, fsdp_size={entry.get('fsdp_size', -1)}"
        if entry.get("tamper"):
            ok = all(VICTIM in error for error in errors) and not any(committed)
            where = "gathered tensor" if entry["tamper"] == "bit" else "buffer"
            what = f"one bit flipped in the {where} is named"
            proofs.append(_proof(f"{what} ({mesh})", ok, errors[0][:160] or "it was loaded"))
            continue
        worst = 0.0
        for rank in range(2):
            got = torch.load(workdir / f"rollout-{rank}-{number}.pt", weights_only=True)
            apart = [(got[name] - value).abs().max().item() for name, value in wanted.items() if name in got]
            worst = max(worst, *apart) if len(apart) == len(wanted) else float("inf")
        ok = worst < _CLOSE and not any(errors) and all(committed)
        what = f"after a step, both rollout workers have one process's weights ({mesh})"
        proofs.append(_proof(what, ok, errors[0] or f"largest difference {worst:.1e}", seconds))
        seconds = 0.0
    return proofs


def _on_sglang(workdir: Path) -> Iterator[Proof]:
    """Send under both FSDPs, unharmed and with one bit flipped. On a CPU only: with an accelerator that is said."""
    from flashpatch.patches.cpu import platform
    from flashpatch.verify.probes.fsdp import job

    if (found := platform.accelerator()) is not None:
        why = f"not probed beside {found}: run a job, and ask flashpatch-verify --live"
        yield _proof("two ranks send to verl's SGLang server", False, why)
        return
    model = workdir / "model"
    job.make_model(model, hidden_size=64)
    verl_sglang_server.write_tokenizer(model, job.VOCABULARY + 1)
    ended = run(workdir, ON_SGLANG, "on_sglang", **verl_sglang_server.TRAINER)
    seen = ended.seen["rank-0"]
    yield from weigh(seen, ended.problem, _log_probabilities(model, seen), ended.seconds)


def _log_probabilities(model: Path, seen: Mapping[str, Any]) -> list[list[float]]:
    """Return, per prompt, those that one process's weights after the same step give to the server's last tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from flashpatch.verify.probes.fsdp import job

    answers = [saw["answers"] for saw in seen.get("transfers", ()) if "answers" in saw]
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained.load_state_dict(job.plain_step(model))
    found = []
    for prompt, answer in zip(job.PROMPTS, answers[-1] if answers else (), strict=bool(answers)):
        tokens = [int(token) for token in answer[: len(answer) // 2]]
        with torch.no_grad():
            logits = trained(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1)[range(len(tokens)), tokens].tolist())
    return found


def weigh(
    seen: Mapping[str, Any], problem: str, wanted: list[list[float]], seconds: float = 0.0
) -> Iterator[Proof]:
    """Judge what rank 0 saw of SGLang's server; ``wanted`` are log-probabilities of its last tokens."""
    transfers = seen.get("transfers", [])
    if problem or len(transfers) < len(ON_SGLANG):
        what = "two ranks send to verl's SGLang server"
        yield _proof(what, False, problem or f"{len(transfers)} of {len(ON_SGLANG)} transfers", seconds)
        return
    for entry, saw in zip(ON_SGLANG, transfers, strict=True):
        error = saw["error"]
        if entry.get("tamper"):
            what = "one bit flipped in the gathered tensor is named by SGLang's scheduler"
            named = error[max(0, error.rfind("[flashpatch")) :]  # the scheduler's error, within the client's
            said = named[:240] or "it was loaded"
            yield _proof(f"{what} ({entry['strategy']})", VICTIM in error, said)
            continue
        pairs = [
            (got, want)
            for answer, wants in zip(saw["answers"], wanted, strict=True)
            for got, want in zip(answer[len(answer) // 2 :], wants, strict=True)
        ]
        worst = max((abs(got - want) for got, want in pairs), default=1.0)
        changed = saw["answers"] != seen["before"]
        what = f"after a step, SGLang answers as one process's weights would ({entry['strategy']})"
        said = f"log-probabilities differ by {worst:.1e} at most; {'' if changed else 'not '}changed"
        yield _proof(what, not error and changed and worst < _CLOSE_LOGPROBS, error or said, seconds)
        seconds = 0.0
