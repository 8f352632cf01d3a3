"""What `test_spec` and `update_machine` do with toys, on a real engine, whose requests are asked."""

import logging

import pytest
import vllm_updates as updates
from vllm_lab import scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm


def repeats(model: str, atomic: str, operations: int) -> None:
    """A sender that names no end, a tensor a call, one of them twice; requests in the middle of its syncs, none at the end of one. U1."""
    from update_engine import EngineToy
    from update_toys import NAMES

    with opened("bf16", model, options=dict(atomic=atomic), dtype="float32") as llm:
        toy = EngineToy(llm, atomic)
        for number in range(1, 7):
            for place, name in enumerate(NAMES):
                for _ in range(1 + (number == 2 and place == 4)):
                    toy.load([(name, number)])
                if number > 2 and place == 3:
                    assert not toy.request()
            if number != 3:
                assert toy.request() and set(toy.live().values()) == {number}


def any_sequence(model: str, atomic: str, operations: int) -> None:
    import update_engine
    from update_machine import run

    logging.getLogger("flashpatch.fp8").setLevel(logging.CRITICAL)
    with opened("bf16", model, options=dict(atomic=atomic), dtype="float32") as llm:
        run(update_engine.machine(llm, atomic), operations, operations // 18, 20)


@pytest.mark.parametrize("atomic", ["layer", "model"])
@pytest.mark.parametrize(
    "drive,operations",
    [(repeats, 0), (any_sequence, 300), pytest.param(any_sequence, 3000, marks=pytest.mark.full)],
)
def test_an_engine_does_what_the_specification_says(
    runner: scenario.Runner, drive, operations: int, atomic: str
) -> None:
    runner(drive, updates.checkpoint("qwen2", 0, num_hidden_layers=1), atomic, operations)
