"""vLLM's own version spans per token, from 0.32 on, beside what FlashPatch knows of each step: both name the same policy."""

from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, environment, models, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm(least="0.32")

TOKENS = 12
BEFORE = 6  # steps until the update comes
CASES = (("keep", False), ("recompute", False), ("recompute", True))


# --- what runs in the engine's process


def in_flight(a: str, b: str, mode: str, ahead: bool) -> dict[str, Any]:
    """An update while a request runs: vLLM's spans of its tokens, and the version that each step was computed with."""
    from flashpatch.patches.fp8.vllm import engine_core

    if ahead:
        engines.schedule_a_step_ahead()
    with opened("bf16", a, options=dict(in_flight=mode)) as llm:
        core = llm.llm_engine.engine_core.engine_core
        computed = _note_versions(core)
        engines.add(llm, "running", tokens=TOKENS)
        engines.step(llm, BEFORE)
        updates.send(llm, [list(models.weights(b))])
        [answer] = engines.ended(llm)["running"].outputs
        found = dict(asynchronous=core.async_scheduling, computed=computed)
        found["spans"] = [[span.version, span.start, span.end] for span in answer.weight_versions]
        found["version"] = engine_core.gates[core].version
    return found


def labelled(a: str, b: str) -> list[str]:
    """The weight version after an update by a call that its caller names, and after one that nobody names."""
    found = []
    with opened("bf16", a) as llm:
        core = llm.llm_engine.engine_core.engine_core
        for path, label in ((b, "mine"), (a, None)):
            llm.collective_rpc("reload_weights", kwargs=dict(weights_path=path))
            if label is not None:
                core.set_weight_version(label)
            engines.greedy(llm, tokens=1)
            found.append(core.get_weight_version())
    return found


def _note_versions(core: Any) -> list[int]:
    """For each token that is kept, the version that the step which drew it was stamped with."""
    versions: list[int] = []
    update = core.scheduler.update_from_output

    def noted(step: Any, *rest: Any) -> Any:
        outputs = update(step, *rest)
        for one in outputs.values():
            versions.extend(step.flashpatch_version for output in one.outputs for _ in output.new_token_ids)
        return outputs

    core.scheduler.update_from_output = noted
    return versions


# --- the tests


def test_a_label_is_of_its_update_alone(runner: scenario.Runner, ab: tuple[str, str]) -> None:
    assert runner(labelled, *ab) == ["mine", "flashpatch-2"]


@pytest.mark.parametrize(
    ("mode", "ahead"), [("keep", True), *(pytest.param(*case, marks=pytest.mark.full) for case in CASES)]
)
def test_spans_are_those_of_the_steps(ab: tuple[str, str], mode: str, ahead: bool) -> None:
    with scenario.Runner(environment.V2 if ahead else None) as runner:
        got = runner(in_flight, *ab, mode, ahead)
    assert got["asynchronous"] is ahead and got["version"] == 1
    assert len(got["computed"]) == TOKENS and set(got["computed"]) == {0, 1}
    of_steps = [f"flashpatch-{number}" if number else "default" for number in got["computed"]]
    assert [version for version, start, end in got["spans"] for _ in range(start, end)] == of_steps
