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
        "capture": Option(True, "keep hidden states of finished requests for the drafter", kind=bool),
        "capture_rate": Option(1.0, "share of requests that are captured, 0 to 1", kind=float),
        "capture_budget": Option(0, "tokens captured per policy version; 0: any number", kind=int),
        "capture_tokens": Option(65536, "tokens of captured states held on the host at a time", kind=int),
        "ring": Option("", "directory of the captured samples; empty: beside this run's ledger"),
        "ring_slots": Option(1024, "samples the ring holds; the oldest gives way", kind=int),
        "ring_bytes": Option(1 << 30, "bytes the ring holds; the oldest sample gives way", kind=int),
        "adapt": Option(True, "choose the speculative configuration of each step by the bandit", kind=bool),
        "arms": Option([], "arms such as 3_1_4 or disable; empty: all that the engine can do", kind=list),
        "rule": Option("", "the bandit's rule; empty: the one that won our benchmark"),
        "window": Option(300, "rewards the bandit remembers", kind=int),
        "guard": Option(2048, "most draft tokens times batch size that an arm may ask for", kind=int),
        "seed": Option(0, "seed of the bandit's and of the capture's choices", kind=int),
        "state": Option(
            "", "file that keeps what the bandit learned from one run to the next; empty: nowhere"
        ),
        "drafter": Option(
            "", "under verl: folder of the rollout engine's drafter, or new; empty: the recipe's own"
        ),
        "draft_tokens": Option(3, "under verl: tokens that this drafter may draft per step", kind=int),
        "cotrain": Option(True, "under verl: train the drafter while rollouts rest", kind=bool),
        "slice": Option(60.0, "seconds of training between two rollouts, at most", kind=float),
        "patience": Option(
            30.0, "seconds that a rollout waits for the trainer before it is killed", kind=float
        ),
        "trainer": Option([], "settings of the training process, such as rate=1e-3 and least=4", kind=list),
        "rollback": Option(
            0.2,
            "share of the acceptance length that new drafter weights may cost before they go back; 1: any",
            kind=float,
        ),
        "rollback_steps": Option(
            64, "speculative steps over which acceptance is compared around a sync", kind=int
        ),
    },
    probe=_probe,
)
