"""What an engine core does in place of a step that it refuses, if other engines wait for it in their forward."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from flashpatch.patches.fp8.vllm import engine_core, scheduler_gate


class Core:
    """An engine core of ``size`` data-parallel ones; ``ran`` counts its empty batches."""

    def __init__(self, size: int, is_moe: bool, is_sleeping: bool = False) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=size),
            model_config=SimpleNamespace(is_moe=is_moe),
        )
        self.model_executor = SimpleNamespace(is_sleeping=is_sleeping)
        self.ran = 0

    def execute_dummy_batch(self) -> None:
        self.ran += 1


@pytest.mark.parametrize(
    ("core", "ran"),
    [
        (Core(2, is_moe=True), 1),  # its experts are in the others' forward, and its vote in their all-reduce
        (Core(2, is_moe=True, is_sleeping=True), 0),  # there is no memory to run on
        (Core(2, is_moe=False), 0),
        (Core(1, is_moe=True), 0),
    ],
)
def test_a_refused_step_runs_an_empty_batch_where_others_wait(core: Core, ran: int, monkeypatch: Any) -> None:
    class Gate(scheduler_gate.SchedulerGate):
        def replacement_outputs(self, core: Any) -> Any:
            return {0: "ended"}

    gate = Gate.__new__(Gate)
    vars(gate).update(stepped=True, turn=nullcontext(), door=SimpleNamespace(runner=None, models=tuple))
    monkeypatch.setattr(engine_core, "gates", {core: gate})
    outputs = engine_core.engine_core_step(lambda core: pytest.fail("the step was refused"), core)
    assert outputs == ({0: "ended"}, bool(ran)) and core.ran == ran
