"""Open an engine with an EAGLE drafter and captured graphs, update policy and drafter, note what each arm answers and drafts.

    python -m cuda_lab.drafts fresh|update CHECKPOINTS OUT ARM...

An arm is a number of drafts. `fresh` opens the second policy with its drafter; `update` opens the first policy with a drafter of
noise, asks, loads both, and asks again. FlashPatch chooses the number of drafts in both, and updates weights in the second."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import eagle_job_common
import vllm
from vllm.v1.worker.gpu import cudagraph_utils
from vllm_lab import models

from cuda_lab import device, engine, results, state

MOST = 3
GRAPHS = {**engine.GRAPHS, "cudagraph_capture_sizes": [1, 2, 3, 4, 6, 8, 12, 16]}
PROMPTS = eagle_job_common.prompts()[:2]


def main(mode: str, root: str, out: str, *arms: str) -> None:
    import flashpatch

    at, replayed = checkpoints(Path(root)), count_replays()
    # else vLLM's first runner keeps its full graphs, and one number
    named = ["disable", "1_1_2", "2_1_3", "3_1_4"]
    flashpatch.enable("eagle", strict=True, arms=named)
    numbers = [int(arm) for arm in arms]
    if mode == "fresh":
        llm = opened(at["b"], at["exact"])
        found = asked(llm, numbers, replayed)
    else:
        llm = opened(at["a"], at["noise"])
        before, addresses = asked(llm, numbers, replayed), addresses_of(llm)
        engine.reload(llm, at["b"])
        llm.collective_rpc("eagle_update_drafter", args=(str(at["exact"]), 1))
        moved = [path for path, address in addresses_of(llm).items() if addresses[path] != address]
        found = asked(llm, numbers, replayed)
        for arm, result in found.items():
            result |= {"before": before[arm], "moved": moved}
    for arm, result in found.items():
        results.add(out, arm, {**result, "launches": device.refused_launches()})
    results.leave()


def checkpoints(root: Path) -> dict[str, Path]:
    """Write two policies whose layers add little, a drafter that is right for either most of the time, and one of noise."""
    from flashpatch.verify.probes.eagle import tiny

    with models.making(root / "drafts") as (at, work):
        if work is not None:
            for name, seed in (("a", 2), ("b", 4)):
                tiny.target(work / name, seed=seed, adds=0.02)
            tiny.drafter(work / "exact")
            tiny.drafter(work / "noise", exact=False)
    return {path.name: path for path in at.iterdir()}


def opened(policy: Path, drafter: Path) -> vllm.LLM:
    speculative = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": MOST}
    arguments = {**engine.ENGINE, "compilation_config": GRAPHS, "kernel_config": engine.COLD}
    return vllm.LLM(str(policy), **arguments, speculative_config=speculative)


def count_replays() -> Counter[str]:
    """Return a counter of the graphs that are replayed from now on, by the manager's class and the drafts of a graph."""
    replayed: Counter[str] = Counter()
    real = cudagraph_utils.CudaGraphManager.run_fullgraph

    def counted(self: Any, desc: Any) -> Any:
        drafts = getattr(desc, "num_speculative_tokens", "")
        replayed[f"{type(self).__name__} {desc.uniform_token_count} {drafts}".strip()] += 1
        return real(self, desc)

    cudagraph_utils.CudaGraphManager.run_fullgraph = counted
    return replayed


def asked(llm: vllm.LLM, arms: list[int], replayed: Counter[str]) -> dict[str, dict[str, Any]]:
    """Return by arm the answers, how often drafts were verified, how many were right, and the graphs that ran."""
    from flashpatch.patches.eagle.vllm import spec_controller

    core = llm.llm_engine.engine_core.engine_core
    controller, found = spec_controller.controller_of(core.scheduler), {}
    for arm in arms:
        controller.policy = eagle_job_common.Cycle([arm])
        engine.ask(llm, PROMPTS, 1)  # the number is scheduled with the step before
        drafts, accepted, ran = controller.drafts, controller.accepted, replayed.copy()
        launched = device.graph_launches()
        answers = engine.ask(llm, PROMPTS, 12)
        found[str(arm)] = {
            "answers": answers,
            "drafts": controller.drafts - drafts,
            "accepted": controller.accepted - accepted,
            "replayed": dict(replayed - ran),
            "graphs": device.graph_launches() - launched,
        }
    return found


def addresses_of(llm: vllm.LLM) -> dict[str, int]:
    """Return the address of each tensor of policy and drafter."""
    runner = engine.worker(llm).model_runner
    drafter = getattr(runner, "speculator", None) or runner.drafter
    found = {f"policy {path}": address for path, address in state.snapshot(runner.model)[1].items()}
    return found | {f"drafter {path}": address for path, address in state.snapshot(drafter.model)[1].items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
