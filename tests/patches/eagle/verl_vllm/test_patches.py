"""The record on the installed verl and vLLM: its contract holds, and undo restores the very object."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from cpu_lab import environment, tail
from machine import limit

pytestmark = pytest.mark.verl

CODE = """
import flashpatch
from flashpatch.arming.preflight import examine
from flashpatch.patches.eagle.verl_vllm import PATCHES

for patch in PATCHES:
    found = examine(patch)
    assert found.problem is None, (patch.id, found.problem)

flashpatch.enable("cpu", "bf16")
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer as server

before = vars(server)["collective_rpc"]
flashpatch.enable("eagle")
assert vars(server)["collective_rpc"] is not before
flashpatch.disable("eagle")
assert vars(server)["collective_rpc"] is before
"""


def test_the_contract_holds_and_undo_restores_the_very_object(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE)],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(300),
    )
    assert done.returncode == 0, tail(done)
