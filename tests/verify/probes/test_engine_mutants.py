"""The wrappers of fp8 and eagle, and what they call, are broken one at a time under vLLM's real engine; see `test_mutants`.

`inner_mutants` has what no wrapper shows from outside: a bucket lost or taken for another, a wrong version, states of
another position, a drafter that is not loaded."""

from collections.abc import Mapping
from pathlib import Path

import inner_mutants
import mutant_runs
import mutants
import pytest
import warm

pytestmark = [pytest.mark.vllm, pytest.mark.full]

IMPORTED = (*warm.VLLM, "inner_mutants")

#: family -> patch -> why a probe of a plain model, which is updated as it should be, cannot see whether it acts
IDLE: Mapping[str, Mapping[str, str]] = {
    "fp8": {
        "fp8.vllm.get_model": "its engine has no drafter; tests/patches/fp8/vllm/test_drafter.py has some, beside dummy weights",
        "fp8.vllm.check_skipped_aliases": "its model is not tied; tests/patches/fp8/vllm/test_tied_weights.py has models that are",
        "fp8.vllm.worker_reload_weights": "it sends no weights in the format of kernels; test_unsupported.py there does",
    },
    "eagle": {},
}


#: family -> patch -> where it acts; the probe opens one engine, with in_flight=refuse, and none before FlashPatch is on
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "fp8": {
        "fp8.vllm.preprocess_add_request": "under in_flight=keep, see tests/patches/fp8/vllm/test_prefix_key.py",
        "fp8.vllm.add_request": "under in_flight=keep, see tests/patches/fp8/vllm/test_prefix_key.py",
        "fp8.vllm.llm_engine_collective_rpc": "on engines that were opened before, see tests/patches/fp8/vllm/test_past_the_gate.py",
        "fp8.vllm.process_outputs": "on requests that the gate ended, see tests/patches/fp8/vllm/test_past_the_gate.py",
        "fp8.vllm.llm_engine_step": "on requests that the gate ended, see tests/patches/fp8/vllm/test_past_the_gate.py",
    },
    "eagle": {
        "eagle.vllm.update_draft_token_ids": "on an engine that drafts from history, see tests/patches/eagle/vllm/test_history_drafts.py",
        "eagle.vllm.validate_spec_decode": "on an engine that drafts from history, see tests/patches/eagle/vllm/test_history_drafts.py",
        "eagle.vllm.build_logitsprocs": "on an engine that drafts from history, see tests/patches/eagle/vllm/test_history_drafts.py",
        "eagle.vllm.create_speculative_config": "it acts before the engine's core has a process, where no count is due",
    },
}


#: family -> patch -> what does its work if it passes a call on; an uncounted call is noticed all the same
DOUBLED: Mapping[str, Mapping[str, str]] = {
    "fp8": {
        "fp8.vllm.process_weights_after_loading": "a complete update is committed before the next step, and layers have hooks "
        "of their own against a second processing",
        "fp8.vllm.worker_execute_model": "fp8.vllm.model_runner_execute_model checks the same",
        "fp8.vllm.model_runner_execute_model": "fp8.vllm.worker_execute_model checks the same",
        "fp8.vllm.engine_core_step": "the gate follows each call that reaches the executor, see executor_door.py",
        "fp8.vllm.core_engine_proc_manager_init": "the core writes a row of its own, if it loads FlashPatch",
        "fp8.vllm.init_executor": "the worker writes a row of its own, if it loads FlashPatch",
        "fp8.vllm.collective_rpc": "the gate follows each call that reaches the executor, see executor_door.py",
    },
    "eagle": {},
}


@pytest.mark.parametrize("family", IDLE)
def test_each_mutant_is_noticed(family: str, tmp_path: Path) -> None:
    idle = {**IDLE[family], **ELSEWHERE[family]}
    spared = {f"{kind} {id}": why for id, why in idle.items() for kind in mutants.KINDS}
    spared |= {f"{kind} {id}": why for id, why in DOUBLED[family].items() for kind in ("bypass", "once")}
    more = inner_mutants.names(family)
    mutant_runs.check_each(family, tmp_path, spared, more=more, imported=IMPORTED)
