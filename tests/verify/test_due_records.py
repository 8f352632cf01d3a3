"""What the records of all families say about evidence: ids and options are real, and enough of it is due."""

from flashpatch import conditions, registry
from flashpatch.evidence import explain, may_be_due

PATCHES = registry.patches()


def test_conditions_and_alternatives_name_patches_that_there_are():
    for patch in PATCHES.values():
        named = {
            id for t in conditions.parse(patch.when) if t.key in ("called", "anywhere") for id in t.values
        }
        assert named | set(patch.one_of) <= set(PATCHES), patch.id
        assert patch.id not in named, f"{patch.id} waits for itself"


def test_alternatives_stand_for_each_other():
    for patch in PATCHES.values():
        for other in patch.one_of:
            assert patch.id in PATCHES[other].one_of and PATCHES[other].framework == patch.framework


def test_most_patches_are_due_in_some_job():
    never = [patch.id for patch in PATCHES.values() if not may_be_due(patch)]
    assert len(PATCHES) - len(never) >= 110, never


def test_it_is_said_in_words():
    said = explain(PATCHES["fp8.vllm.engine_core_step"])
    assert said == "once a step was taken; fp8.vllm.step_with_batch_queue shows it too"
    said = explain(PATCHES["fp8.verl_vllm.sender_cleanup"])
    assert said == "once weights were updated, if fp8.verl_vllm.async_send_weights was called"
    assert explain(PATCHES["fp8.vllm.init_executor"]) == "if it started a process of role worker"
