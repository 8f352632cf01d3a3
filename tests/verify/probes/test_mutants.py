"""Each patch that a probe sees acting is broken in each way of `mutants`; ``flashpatch-verify`` or ``--live`` must notice.

The mutants are generated over the records: every patch with a wrapper that is live in a clean run. Two make no difference
and are left out: ``once`` of what is called once, and ``one_rank`` of what runs in no rank of a job, such as a client of rollout
servers. `SPARED` names further ones, each with its reason. A run prints what noticed each mutant."""

from collections.abc import Mapping
from pathlib import Path

import mutant_runs
import pytest

pytestmark = [pytest.mark.verl, pytest.mark.full]

#: family -> its probe runs on ranks that are numbered
RANKED = {"grpo": True, "cpu": True, "fsdp": True, "flowrl": False}

#: kind and id -> why the probe cannot see it
SPARED: Mapping[str, str] = {
    **dict.fromkeys(
        (f"{kind} cpu.torch.fsdp_param_init" for kind in ("bypass", "one_rank", "once")),
        "vLLM's build for CPUs makes Tensor.pin_memory do nothing in a process that imports it; "
        "tests/patches/cpu/test_installed.py imports none and sees it",
    ),
    **dict.fromkeys(
        (
            f"{kind} grpo.verl.{name}"
            for kind in ("bypass", "one_rank", "uncounted", "once")
            for name in ("forward_backward_batch", "forward_step")
        ),
        "without verl's rollout.enable_rollout_routing_replay they pass the call on; tests/patches/grpo/replay has it on",
    ),
    "bypass flowrl.verl.compute_advantage": "it changes nothing under the options by default; "
    "test_flowrl.py::test_it_is_live_with_other_options has others",
}


@pytest.mark.parametrize(("family", "ranked"), RANKED.items())
def test_each_mutant_is_noticed(family: str, ranked: bool, tmp_path: Path) -> None:
    mutant_runs.check_each(family, tmp_path, SPARED, ranked=ranked)
