"""Probe family grpo: two ranks step verl's own engines, and verl's client calls a dead server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashpatch.verify.probes import jobs
from flashpatch.verify.probes.grpo.servers import REQUESTS, WANTED
from flashpatch.verify.proof import Proof

OTHER_LOSSES = ("gspo", "clip_cov")
_TIMEOUT = 400.0  # seconds for all ranks together
_CLOSE = 1e-5  # of the gradient's norm: float32, summed in another order


def probe(nonce: str, workdir: Path) -> list[Proof]:
    commands = jobs.ranks("grpo.job:rank", workdir, environment={"TORCH_COMPILE_DISABLE": "1"})
    ended = jobs.run(commands, workdir, _TIMEOUT).checked()
    return list(_weigh(ended.ranks, ended.seconds))


def _weigh(seen: Sequence[Mapping[str, Any]], seconds: float) -> Iterator[Proof]:
    first = seen[0]
    for kind in ("fsdp", "fsdp2"):
        ours = [away for rank in seen for name, away in rank[kind].items() if name != "stock"]
        stock = first[kind]["stock"]
        # The comparison is worth something only if it sees a wrong divisor.
        yield _proof(
            f"under {kind} every split gives the gradient of the whole batch",
            bool(ours) and max(ours) < _CLOSE < stock,
            f"{len(ours)} gradients, largest distance {max(ours):.1e}; stock verl's {stock:.2f}",
            "register_policy_loss",
            seconds,
        )
    refused, routed, resumed = (first[name] for name in ("refused", "routed", "resumed"))
    yield _proof(
        "a recipe with another loss is refused by name",
        all(f"loss_mode={mode}" in said for mode, said in zip(OTHER_LOSSES, refused, strict=True)),
        f"{sum(map(bool, refused))} of {len(refused)} by PatchError before anything started",
        "validate_config",
    )
    yield _proof(
        "requests of a dead server are answered by others",
        routed["answered"] == sum(routed["served"].values()) == REQUESTS
        and routed["left"] == {"servers": ["one", "two"], "outstanding": 0},
        f"{routed['answered']} of {REQUESTS}, by {routed['served']}",
        "generate",
    )
    yield _proof(
        "the balancer learns the lengths of all responses",
        routed["learned"] == REQUESTS,
        f"{routed['learned']} of {REQUESTS}",
        "release_server",
    )
    yield _proof(
        "a response that an update stopped goes on after its server's death, and its parts have their versions",
        bool(resumed) and all(one == WANTED for one in resumed),
        f"{resumed}",
        "generate_part",
    )


def _proof(what: str, ok: bool, evidence: str, patch: str, seconds: float = 0.0) -> Proof:
    return Proof(f"grpo.verl.{patch}", what, ok, evidence, seconds)
