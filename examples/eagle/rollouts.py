"""One engine through all rounds of a drifting policy, with a drafter that keeps learning or one that does not.

    python rollouts.py DIRECTORY ARM ROUNDS SLICE BATCHES WARM REPEATS

ARM is ``co-trained`` or ``frozen``. Co-trained: a drafter from scratch first learns for ``WARM`` slices from what
the engine captures of policy 0; ``drafter-start`` is what it is then. After that comes a round per policy: new
weights for the target, rollouts, a slice of ``SLICE`` seconds for the trainer, new weights for the drafter. TargetEmbeddings:
the same rounds with ``drafter-start`` throughout. A line of JSON per rollout goes to ``ARM.jsonl``.

The target's weights go in through vLLM's own ``reload_weights``: they are float32, so no other family of FlashPatch
has anything to put right, and the drafter shares embedding and head with the target by being handed the same
modules. Cached prefixes would be the old policy's, so the cache of prefixes is off.

Seconds are processor seconds of the engine's process, here and for the bandit: the engine computes in one thread, and
a machine that others use too would otherwise tell more about them than about the arms.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from language import Drift

MOST = 4  # drafts per step at most
LARGEST = 32  # batch of the rollouts that acceptance is measured on, and that the drafter mostly learns from
COMPARED = 4  # batch at which each round runs without speculation too
TOKENS = 128


class Engine:
    """vLLM in this process, with the family on."""

    def __init__(self, out: Path, arm: str, policy: Path, drafter: Path) -> None:
        import flashpatch
        from flashpatch.patches.eagle.vllm import spec_controller
        from flashpatch.verify.probes.eagle import tiny

        self.queue = out / f"queue-{arm}"
        shutil.rmtree(self.queue, ignore_errors=True)
        flashpatch.enable("eagle", strict=True, samples=str(self.queue) * (arm == "co-trained"))
        from vllm import LLM

        self.llm = LLM(
            **tiny.engine_arguments(
                policy,
                max_num_seqs=LARGEST,
                enable_prefix_caching=False,
                kv_cache_memory_bytes=64 << 20,
                speculative_config=dict(method="eagle", model=str(drafter), num_speculative_tokens=MOST),
            )
        )
        self._controller = spec_controller.controller_of(
            self.llm.llm_engine.engine_core.engine_core.scheduler
        )
        self._controller.clock = time.process_time
        self.bandit = self._controller.policy

    def roll(
        self,
        prompts: list[list[int]],
        arm: str = "",
        temperature: float = 1.0,
        tokens: int = TOKENS,
        bandit: Any = None,
    ) -> dict[str, Any]:
        """Answers of ``tokens`` tokens, with a fixed arm, or without one with the engine's bandit (or another).

        Returns acceptance length (of the steps that drafted), tokens per second, arms by steps, and the answers.
        """
        from vllm import SamplingParams

        from flashpatch.patches.eagle.bandit.policy import Policy

        controller = self._controller
        controller.policy = Policy([arm]) if arm else bandit or self.bandit
        drafts, accepted = controller.drafts, controller.accepted
        pulls = Counter(controller.policy.pulls())
        sampling = SamplingParams(
            temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        began = time.process_time()
        found = self.llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        seconds = time.process_time() - began
        chosen = Counter(controller.policy.pulls()) - pulls
        controller.policy = self.bandit
        drafts = controller.drafts - drafts
        return {
            "length": 1 + (controller.accepted - accepted) / drafts if drafts else None,
            "rate": len(prompts) * tokens / seconds,
            "seconds": seconds,
            "chosen": dict(chosen),
            "answers": [list(one.outputs[0].token_ids) for one in found],
        }

    def captured(self) -> dict[str, Any]:
        """Have the last answers filed. A worker in this process hears of their end with the next step only."""
        self.roll([[5]], tokens=1)
        [counts] = self.llm.collective_rpc("eagle_flush")
        return counts


def main(out: Path, arm: str, rounds: int, pause: float, batches: list[int], warm: int, repeats: int) -> None:
    learns = arm == "co-trained"
    start = out / "drafter-start"
    trainer = Trainer(out, pause) if learns else None
    engine = Engine(out, arm, out / "policy-00", trainer.scratch if learns else start)
    drift, began = Drift(), time.monotonic()
    with open(out / f"{arm}.jsonl", "w", buffering=1) as file:

        def note(number: int, what: str, batch: int, found: dict[str, Any]) -> None:
            facts = {name: value for name, value in found.items() if name != "answers"}
            file.write(json.dumps({"round": number, "what": what, "batch": batch, **facts}) + "\n")

        for number in range(-warm if learns else 0, rounds + 1):
            policy = max(0, number)
            if number > 0:
                folder = out / f"policy-{policy:02}"
                engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                if trainer:
                    trainer.coordinator.order(target=str(folder))
            at = policy / max(1, rounds)
            whole = engine.roll(drift.prompts(at, LARGEST, policy), f"{MOST}_1_{MOST + 1}")
            note(number, "measured", LARGEST, whole)
            said = f"{arm} {number}/{rounds}: acceptance length {whole['length']:.2f} of {MOST + 1}"
            if number >= 0:
                for batch in batches:
                    prompts = drift.prompts(at, batch, 1000 + policy)
                    if batch == COMPARED:
                        note(number, "none", batch, engine.roll(prompts, "disable"))
                    note(number, "bandit", batch, engine.roll(prompts))
            if trainer:
                counts = engine.captured()
                said += f"; {trainer.slice()}, {counts['requests']} requests captured"
                engine.llm.collective_rpc(
                    "eagle_update_drafter", args=(str(trainer.keep(number)), trainer.version)
                )
                if number == -1:
                    shutil.copytree(trainer.drafter, start)
            print(f"   {said}; {time.monotonic() - began:.0f} s", flush=True)
        if learns:
            for row in sweep(engine, drift.prompts(1.0, LARGEST, 9), batches, repeats):
                note(rounds, "speed", row.pop("batch"), row)
            trainer.coordinator.close()
        notes(engine, out, arm)


def sweep(engine: Engine, prompts: list[list[int]], batches: list[int], repeats: int) -> list[dict[str, Any]]:
    """Greedy answers by no speculation, every fixed arm, and a bandit that starts from nothing, in turns.

    Returns a row per batch and arm: ``rate``, tokens per second, is the median over the turns; ``rates`` has each
    turn, the first one that in which the bandit knew nothing; of ``compared`` answers ``unlike`` differ from those
    without speculation.
    """
    from flashpatch.engine import options
    from flashpatch.patches.eagle.vllm import spec_controller

    bandit = spec_controller.make_policy(options("eagle"), MOST)
    names = ["disable", *(f"{k}_1_{k + 1}" for k in range(1, MOST + 1)), "bandit"]
    plain: dict[int, list[list[int]]] = {}
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    unlike: Counter[tuple[int, str]] = Counter()
    for repeat in range(repeats):
        for batch in batches:
            for name in names:
                asked = dict(bandit=bandit) if name == "bandit" else dict(arm=name)
                found = engine.roll(prompts[:batch], temperature=0.0, **asked)
                wanted = plain.setdefault(
                    batch, found["answers"]
                )  # those of no speculation, which is the first
                rates[batch, name].append(found["rate"])
                unlike[batch, name] += sum(a != b for a, b in zip(wanted, found["answers"], strict=True))
        print(f"   speed: {repeat + 1}/{repeats}", flush=True)
    return [
        {
            "batch": batch,
            "arm": name,
            "rate": median(each),
            "rates": each,
            "compared": batch * len(each),
            "unlike": unlike[batch, name],
        }
        for (batch, name), each in rates.items()
    ]


class Trainer:
    """The drafter's training process, and the drafters that come from it."""

    def __init__(self, out: Path, pause: float) -> None:
        from transformers import AutoConfig

        from flashpatch.patches.eagle.train.coordinator import Coordinator
        from flashpatch.patches.eagle.train.drafter import make_drafter
        from flashpatch.patches.eagle.train.drafter_config import drafter_config
        from flashpatch.patches.eagle.train.export import save_drafter

        policy = out / "policy-00"
        for old in (*out.glob("drafter-*"), out / "trainer"):
            shutil.rmtree(old, ignore_errors=True)
        config = drafter_config(AutoConfig.from_pretrained(policy))
        self.scratch = save_drafter(
            out / "drafter-scratch", make_drafter(config).state_dict(), config, "vllm"
        )
        self.drafter, self.version, self._out, self._pause = self.scratch, 0, out, pause
        self.coordinator = Coordinator(
            dict(
                target=str(policy),
                queue=str(out / "queue-co-trained"),
                folder=str(out / "trainer"),
                dtype="float32",
                rate=3e-3,
                tokens=1.0,
                window=256,
                batch=512,
                versions=2,
                checkpoint=0,
                threads=1,
                niceness=0,
            )
        )
        self.coordinator.start()

    def slice(self) -> str:
        """Let it train while the engine rests; what it says."""
        coordinator = self.coordinator
        before = coordinator.counts["drafters"]
        if not coordinator.train(self._pause):
            return f"no training: the trainer is {coordinator.state}, {coordinator.problem}"
        while coordinator.state in ("starting", "training"):
            time.sleep(0.1)
            coordinator.poll()
        if coordinator.counts["drafters"] == before:
            return f"nothing learned: {coordinator.problem or 'too few samples'}"
        figures = coordinator.figures
        return f"trained to step {figures['step']}"

    def keep(self, number: int) -> Path:
        """The newest drafter, put where it stays."""
        self.version += 1
        if self.coordinator.drafter is not None:
            self.drafter = self._out / (f"drafter-{number:02}" if number >= 0 else f"drafter-warm{number}")
            shutil.copytree(self.coordinator.drafter, self.drafter, dirs_exist_ok=True)
        return self.drafter


def notes(engine: Engine, out: Path, arm: str) -> None:
    """What the ledger has of capture, speculation and drafter versions."""
    from flashpatch import ledger

    (out / f"{arm}.notes.json").write_text(json.dumps(ledger.notes(), indent=1, default=str))


if __name__ == "__main__":
    directory, name, number, pause, sizes, warm, repeats = sys.argv[1:]
    batches = [int(size) for size in sizes.split(",")]
    main(Path(directory), name, int(number), float(pause), batches, int(warm), int(repeats))
    sys.stdout.flush()
    os._exit(0)  # all is said; vLLM's shutdown takes seconds
