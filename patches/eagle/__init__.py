"""Run FastRL's adaptive speculative rollouts on stock engines: capture, a bandit, drafter co-training."""

from __future__ import annotations

from importlib.util import find_spec

from flashpatch.patches.eagle.verl import PATCHES as VERL
from flashpatch.patches.eagle.verl_sglang import PATCHES as VERL_SGLANG
from flashpatch.patches.eagle.verl_vllm import PATCHES as VERL_VLLM
from flashpatch.patches.eagle.vllm import PATCHES as VLLM
from flashpatch.record import Family, Option, Patch


def _sglang() -> tuple[Patch, ...]:
    if find_spec("flashpatch.patches.eagle.sglang") is None:
        return ()
    from flashpatch.patches.eagle.sglang import PATCHES

    return PATCHES


FAMILY = Family(
    name="eagle",
    summary="adaptive speculative rollouts: hidden-state capture, tokens per step by a bandit, drafter co-training",
    patches=(*VLLM, *_sglang(), *VERL, *VERL_VLLM, *VERL_SGLANG),
    options={
        "capture": Option(True, "capture hidden states of finished requests to train the drafter", kind=bool),
        "capture_rate": Option(1.0, "share of requests to capture", kind=float, least=0, most=1),
        "capture_budget": Option(0, "tokens to capture per policy version; 0: no limit", kind=int, least=0),
        "capture_tokens": Option(
            0,
            "tokens of captured states held in host memory at a time; 0: as many as fit in 5 % of the memory that is free",
            kind=int,
            least=0,
        ),
        "capture_window": Option(
            512,
            "most positions captured of a request; of longer ones a window drawn at random",
            kind=int,
            least=16,
        ),
        "ring": Option("", "directory of captured samples; empty: beside this run's ledger"),
        "ring_slots": Option(
            1024, "most samples in that directory; the oldest are removed first", kind=int, least=1
        ),
        "ring_bytes": Option(
            1 << 30, "most bytes in that directory; the oldest samples are removed first", kind=int, least=1
        ),
        "adapt": Option(True, "choose the speculative configuration of each step by a bandit", kind=bool),
        "arms": Option(
            [],
            "configurations to choose from, such as 3_1_4 or disable; empty: all that the engine supports",
            kind=list,
        ),
        "rule": Option("", "the bandit's rule; empty: thompson"),
        "epsilon": Option(
            0.1, "share of choices at random, for the rules eg and beg", kind=float, least=0, most=1
        ),
        "groups": Option(
            [],
            "batch sizes that share what the bandit learns, by the largest of each group: 1, 4, 20, 21; the last group "
            "has all larger ones too; empty: by size up to 31, then coarser",
            kind=list,
        ),
        "table": Option(
            [],
            "for the rule predefined: the configuration up to each batch size, such as 4:8_4_32",
            kind=list,
        ),
        "window": Option(300, "steps that the bandit learns from", kind=int, least=2),
        "graph_memory": Option(
            0.0,
            "GiB for the captured graphs of all arms, by an estimate; arms that do not fit are dropped; 0: any",
            kind=float,
            least=0,
        ),
        "guard": Option(2048, "most draft tokens times batch size of a configuration", kind=int, least=1),
        "seed": Option(0, "seed of the bandit and of the capture's sampling", kind=int),
        "state": Option("", "file that keeps the bandit's state between runs; empty: not kept"),
        "history": Option(
            False, "draft from the request's own text and earlier answers; needs no drafter", kind=bool
        ),
        "history_drafts": Option(
            8, "most tokens drafted from history per step, on an engine without a drafter", kind=int, least=1
        ),
        "history_tokens": Option(262144, "tokens of earlier text to remember per engine", kind=int, least=1),
        "drafter": Option(
            "",
            "under verl: folder of the drafter, or new (EAGLE-1) or new-eagle3 to make one; empty: as verl's "
            "configuration says",
        ),
        "draft_tokens": Option(
            3, "under verl: tokens to draft per step with that drafter", kind=int, least=1
        ),
        "cotrain": Option(True, "under verl: train the drafter between rollouts", kind=bool),
        "slice": Option(60.0, "most seconds of drafter training between two rollouts", kind=float, above=0),
        "slice_steps": Option(
            0, "most steps of drafter training between two rollouts; 0: as time allows", kind=int, least=0
        ),
        "train_every": Option(
            1, "under verl: train the drafter in every so many steps of the policy", kind=int, least=1
        ),
        "train_on": Option(
            "process",
            "under verl, where the drafter is trained: in a process of its own, or by verl's workers, on the devices of "
            "replicas that wait for others to finish a step's rollouts",
            choices=("process", "workers"),
        ),
        "rest_slice": Option(
            0.0,
            "with train_on = workers: most seconds by which the policy's training waits for drafter training on all "
            "devices, in steps whose rollouts left less time for it",
            kind=float,
            least=0,
        ),
        "patience": Option(30.0, "seconds to wait before killing the drafter's trainer", kind=float, above=0),
        "trainer": Option([], "settings of the drafter's training, such as rate=1e-3 and least=4", kind=list),
        "ttt_steps": Option(
            1,
            "under verl: draft steps that the drafter's training unrolls (training-time test); 1: the first alone",
            kind=int,
            least=1,
        ),
        "rollback": Option(
            0.2,
            "largest relative loss of acceptance length before new drafter weights are rolled back; 1: any",
            kind=float,
            least=0,
        ),
        "rollback_steps": Option(
            64,
            "speculative steps over which acceptance is compared before and after a refit",
            kind=int,
            least=1,
        ),
    },
    commands={"eagle-warmup": "flashpatch.patches.eagle.vllm.warmup"},
)
