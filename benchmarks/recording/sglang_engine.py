"""SGLang, whose scheduler is a process of its own: it is told the arms, and tells of its steps, by two files.

A scheduler is started afresh and runs the script again up to its ``__main__`` part. There it calls `follow`, which
puts these files in the place of the bandit's choice. On a machine without an accelerator SGLang runs on the
stand-ins of ``tests/support/sglang_standins``.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flashpatch.patches.eagle.bandit.arm import Arm
from recording.line_up import Row

FOLDER, CLOCK = "RECORD_TRACE_FOLDER", "RECORD_TRACE_CLOCK"
_STANDINS = Path(__file__).parents[2] / "tests" / "support" / "sglang_standins"


def follow() -> None:
    """In a scheduler's process: the arms of the file, and a line per step."""
    if FOLDER not in os.environ:
        return
    from flashpatch.patches.eagle.bandit.policy import Policy
    from flashpatch.patches.eagle.sglang.spec_controller import SpecController

    told, seen = Path(os.environ[FOLDER]) / "arms", Path(os.environ[FOLDER]) / "steps"
    at = 0

    def select(self: Policy, batch_size: int) -> Arm:
        nonlocal at
        arms = told.read_text().split()
        at += 1
        return Arm.parse(arms[at % len(arms)])

    def update(self: Policy, batch_size: int, arm: Arm, tokens: float, seconds: float) -> None:
        with open(seen, "a") as file:
            file.write(json.dumps([batch_size, tokens, seconds]) + "\n")

    Policy.select, Policy.update = select, update
    SpecController.__init__ = functools.partialmethod(
        SpecController.__init__, clock=getattr(time, os.environ[CLOCK])
    )


class Engine:
    """As `recording.vllm_engine.Engine`; ``folder`` is where the files and converted drafters are."""

    def __init__(self, target: Path, drafter: Path, most: int, batch: int, clock: str, folder: Path) -> None:
        os.environ |= {FOLDER: str(folder), CLOCK: clock, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        import torch

        alone = not torch.cuda.is_available()
        if alone:
            sys.path.insert(0, str(_STANDINS))
            os.environ |= {"PYTHONPATH": str(_STANDINS), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
        import flashpatch

        arms = ["disable", *(f"{k}_1_{k + 1}" for k in range(1, most + 1))]
        flashpatch.enable("eagle", strict=True, capture_rate=0.0, rollback=1.0, arms=arms)
        import sglang

        from flashpatch.verify.probes.eagle import tiny

        self.name = f"sglang {version('sglang')}" + (" on a CPU, stand-in kernels" if alone else "")
        self._folder = folder
        self._tell(arms[:1])
        self.llm = sglang.Engine(
            **tiny.sglang_arguments(
                target,
                self._converted(drafter),
                most,
                disable_radix_cache=True,
                disable_overlap_schedule=True,
                max_total_tokens=16384,
                max_running_requests=batch,
                mem_fraction_static=0.5,
                log_level="error",
            )
        )

    def weights(self, target: Path, drafter: Path) -> None:
        """New weights for both."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        from flashpatch.patches.eagle.sglang import drafter_refit

        llm = self.llm
        assert llm.begin_weight_update("target")[0]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=llm._serialize_tensors_per_rank(list(_tensors(target)), None),
            selector="target",
            flush_cache=True,
        )
        done = llm.loop.run_until_complete(llm.tokenizer_manager.update_weights_from_tensor(request, None))
        assert done[0] and llm.end_weight_update()[0], done
        drafter_refit.send(llm, _tensors(self._converted(drafter)))

    def run(self, arms: list[Arm], prompts: list[list[int]], tokens: int) -> tuple[list[Row], list[float]]:
        """See `recording.vllm_engine.Engine`."""
        self._tell([str(arm) for arm in arms])
        self.llm.generate(
            input_ids=prompts, sampling_params=dict(temperature=0, max_new_tokens=tokens, ignore_eos=True)
        )
        steps = [json.loads(line) for line in (self._folder / "steps").read_text().splitlines()]
        rows = [(gained / batch, seconds) for batch, gained, seconds in steps if batch == len(prompts)]
        return rows, [seconds for _, _, seconds in steps]

    def _tell(self, arms: list[str]) -> None:
        (self._folder / "steps").write_text("")
        (self._folder / "arms").write_text(" ".join(arms))

    def _converted(self, drafter: Path) -> Path:
        """A drafter that was written for vLLM, as SGLang reads it."""
        import torch
        from safetensors.torch import save_file

        made = self._folder / drafter.name
        if not made.exists():
            shutil.copytree(drafter, made)
            tensors = dict(_tensors(drafter))
            tensors["fc.bias"] = torch.zeros(len(tensors["fc.weight"]))
            save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((made / "config.json").read_text())
            config["architectures"] = ["LlamaForCausalLMEagle"]
            (made / "config.json").write_text(json.dumps(config))
        return made


def _tensors(folder: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors").items()
