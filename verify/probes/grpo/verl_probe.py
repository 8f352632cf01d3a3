"""Probe family grpo: two ranks step verl's own engines, and verl's client calls a dead server."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashpatch.proof import Proof
from flashpatch.verify import processes
from flashpatch.verify.probes import calls
from flashpatch.verify.probes.grpo.resumed import WANTED
from flashpatch.verify.processes import Command

RANKS = 2
OTHER_LOSSES = ("gspo", "clip_cov")
_TIMEOUT = 400.0  # seconds for all ranks together
_TAKEN = (
    "validate_config",
    "acquire_server",
    "generate",
    "release_server",
    "vllm_request_id",
    "generate_part",
    "generate_whole",
)
_CLOSE = 1e-5  # of the gradient's norm: float32, summed in another order
_REQUESTS = 40


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the ranks and judge what they saw."""
    began = time.monotonic()
    problem = run(workdir)
    seconds = time.monotonic() - began
    if problem:
        return [Proof("grpo", "two ranks train with verl's engines", False, problem, seconds)]
    seen = [json.loads((workdir / f"seen-{rank}.json").read_text()) for rank in range(RANKS)]
    return [*_weigh(seen, seconds), calls.counted(nonce, "grpo.verl", {"trainer": _TAKEN})]


def run(workdir: Path) -> str:
    """Run `flashpatch.verify.probes.grpo.job` on all ranks; return what went wrong, or an empty string."""
    main = processes.entry_point("flashpatch.verify.probes.grpo.job", workdir)
    ranks = [
        Command(f"rank-{rank}", main, {**variables, "TORCH_COMPILE_DISABLE": "1"})
        for rank, variables in enumerate(processes.rank_environments(workdir, RANKS))
    ]
    return processes.problems(processes.run(ranks, workdir, _TIMEOUT))


def _weigh(seen: list[Mapping[str, Any]], seconds: float) -> list[Proof]:
    """Judge what the ranks saw; ``seconds`` is what running them took."""
    first, proofs = seen[0], []
    for kind in ("fsdp", "fsdp2"):
        ours = [
            away for rank in seen for name, away in rank[kind].items() if ", " in name and "stock" not in name
        ]
        stock = first[kind]["stock, 8 configured"]
        # The comparison is worth something only if it sees a wrong divisor.
        proofs.append(
            Proof(
                "grpo.verl.register_policy_loss",
                f"under {kind} every split gives the gradient of the whole batch",
                bool(ours) and max(ours) < _CLOSE < stock,
                f"{len(ours)} gradients, largest distance {max(ours):.1e}; stock verl's {stock:.2f}",
                seconds,
            )
        )
    refused = first["refused"]
    proofs.append(
        Proof(
            "grpo.verl.validate_config",
            "a recipe with another loss is refused by name",
            all(f"loss_mode={mode}" in said for mode, said in zip(OTHER_LOSSES, refused, strict=True)),
            f"{sum(map(bool, refused))} of {len(refused)} by PatchError before anything started",
        )
    )
    routed = first["routed"]
    proofs.append(
        Proof(
            "grpo.verl.generate",
            "requests of a dead server are answered by others",
            routed["answered"] == _REQUESTS
            and routed["left"] == {"servers": ["one", "two"], "outstanding": 0}
            and sum(routed["served"].values()) == _REQUESTS,
            f"{routed['answered']} of {_REQUESTS}, by {routed['served']}",
        )
    )
    proofs.append(
        Proof(
            "grpo.verl.release_server",
            "the balancer learns the lengths of all responses",
            routed["learned"] == _REQUESTS,
            f"{routed['learned']} of {_REQUESTS}",
        )
    )
    proofs.append(
        Proof(
            "grpo.verl.generate_part",
            "a response goes on from its lost server's last token, and its parts have their versions",
            bool(first["resumed"]) and all(one == WANTED for one in first["resumed"]),
            f"{first['resumed']}",
        )
    )
    away = first["logprobs"]
    proofs.append(
        Proof("grpo", "log-probabilities from blocks", away < 1e-4, f"{away:.0e} from the plain ones")
    )
    return proofs
