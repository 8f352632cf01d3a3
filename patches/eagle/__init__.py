"""Run FastRL's adaptive speculative rollouts on stock engines: capture, a bandit, drafter co-training."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from flashpatch.patches.eagle.verl import PATCHES as VERL
from flashpatch.patches.eagle.vllm import PATCHES as VLLM
from flashpatch.proof import Proof
from flashpatch.record import Family, Option, Patch


def _sglang() -> tuple[Patch, ...]:
    if find_spec("flashpatch.patches.eagle.sglang") is None:
        return ()
    from flashpatch.patches.eagle.sglang import PATCHES

    return PATCHES


def _probe(nonce: str, workdir: Path) -> list[Proof]:
    from flashpatch.verify.probes.eagle.probe import probe

    return probe(nonce, workdir)


FAMILY = Family(
    name="eagle",
    summary="adaptive speculative rollouts: hidden-state capture, tokens per step by a bandit, drafter co-training",
    patches=(*VLLM, *_sglang(), *VERL),
    options={
        "capture": Option(True, "capture hidden states of finished requests for drafter training", kind=bool),
        "capture_rate": Option(1.0, "share of requests to capture, 0 to 1", kind=float),
        "capture_budget": Option(0, "tokens to capture per policy version; 0: no limit", kind=int),
        "capture_tokens": Option(
            65536, "tokens whose captured states fit into host memory at a time", kind=int
        ),
        "ring": Option("", "directory for captured samples; empty: beside this run's ledger"),
        "ring_slots": Option(1024, "captured samples to keep; the oldest is deleted first", kind=int),
        "ring_bytes": Option(
            1 << 30, "bytes of captured samples to keep; the oldest is deleted first", kind=int
        ),
        "adapt": Option(True, "let the bandit choose the speculative configuration of each step", kind=bool),
        "arms": Option(
            [],
            "configurations to choose from, such as 3_1_4 (steps, top-k, tokens) or disable; empty: all",
            kind=list,
        ),
        "rule": Option("", "rule of the bandit; empty: thompson, the best in benchmarks/bandit.py"),
        "window": Option(300, "steps over which the bandit forgets what it learned", kind=int),
        "guard": Option(2048, "largest draft tokens times batch size of a configuration", kind=int),
        "seed": Option(0, "seed of the bandit's choices and of the choice of captured requests", kind=int),
        "state": Option("", "file that keeps what the bandit learned for the next run; empty: none"),
        "drafter": Option(
            "", "under verl: folder of the rollout engine's drafter, or new; empty: as configured in verl"
        ),
        "draft_tokens": Option(3, "under verl: tokens to draft per step with this drafter", kind=int),
        "cotrain": Option(True, "under verl: train the drafter between rollouts", kind=bool),
        "slice": Option(60.0, "most seconds of drafter training between two rollouts", kind=float),
        "patience": Option(30.0, "seconds to wait for the drafter's trainer before killing it", kind=float),
        "trainer": Option(
            [], "settings of the drafter's trainer as NAME=VALUE, such as rate=1e-3 and least=4", kind=list
        ),
        "rollback": Option(
            0.2,
            "roll drafter weights back that lower the acceptance length by more than this share; 1: never",
            kind=float,
        ),
        "rollback_steps": Option(
            64, "speculative steps to compare before and after a drafter update", kind=int
        ),
    },
    probe=_probe,
)
