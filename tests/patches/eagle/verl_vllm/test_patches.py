"""The record on the installed verl and vLLM: its contract holds, and undo restores the very object."""

from __future__ import annotations

import cpu_lab
import pytest
import warm

pytestmark = pytest.mark.verl

CODE = """
import flashpatch
from flashpatch.arming.preflight import examine
from flashpatch.decorate import Patches
from flashpatch.patches.eagle.verl_vllm import collective_rpc

found = examine(Patches.of(collective_rpc))
assert found.problem is None, found.problem

flashpatch.enable("cpu", "bf16")
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer as server

before = vars(server)["collective_rpc"]
flashpatch.enable("eagle")
assert vars(server)["collective_rpc"] is not before
flashpatch.disable("eagle")
assert vars(server)["collective_rpc"] is before
"""


def test_the_contract_holds_and_undo_restores_the_very_object(tmp_path):
    done = cpu_lab.python(CODE, tmp_path, imported=warm.VERL_VLLM)
    assert done.returncode == 0, cpu_lab.tail(done)
