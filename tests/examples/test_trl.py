"""The example of a job of TRL, as a reader runs it."""

import os
import sys

import machine
import pytest
from trainer_senders import PLUGINS
from tree import TREE

pytestmark = [pytest.mark.trainer("trl"), pytest.mark.full]


def test_the_job_trains_on_an_fp8_engine_and_is_proven(tmp_path) -> None:
    env = {**os.environ, **PLUGINS, "FLASHPATCH": "fp8", "FLASHPATCH_LEDGER": str(tmp_path / "ledger")}
    command = [sys.executable, "examples/trl_grpo.py", "--steps", "4", "--out", tmp_path / "job"]
    done = machine.run(command, 300, cwd=TREE, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    live = machine.run(
        [sys.executable, "-m", "flashpatch", "runs"], 60, cwd=TREE, env={**env, "FLASHPATCH": "0"}
    )
    assert "trl_grpo.py" in live.stdout and " proven" in live.stdout, live.stdout
