"""FlashPatch broken in one way at a time under a real engine: verify fails and says what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import limit
from tree import SUPPORT
from verify_command import Said, verify

pytestmark = [pytest.mark.vllm, pytest.mark.full]

LEDGER = "the ledger counted what the probe's processes called"


def caught(folder: Path, path: object, *said: str, **variables: str) -> Said:
    """The report of a verification that failed and says all of ``said``."""
    done = verify("fp8", folder, PYTHONPATH=str(path), **variables)
    assert done.code == 1, done.text
    assert not [words for words in said if words not in str(done.family)], done.text
    return done


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (
            "removed",
            ["fp8.vllm.worker_execute_model is displaced: nobody: the original was put back"],
        ),
        # one in the engine core, one in the worker: a report names both
        (
            "displaced,never_called,forked",
            [
                "fp8.vllm.collective_rpc is displaced: sitecustomize.displaced.<locals>.",
                "fp8.vllm.worker_execute_model by any worker",
            ],
        ),
        (
            "worker_without_environment",
            ["wrote no row, though process", "the environment did not reach it"],
        ),
        (
            "core_without_environment",
            ["wrote no row, though process", "engine-core"],
        ),
        ("stale_binding", ["fp8.vllm.initialize_model by any worker"]),
    ],
)
def test_sabotage_is_caught(tmp_path: Path, sabotage: str, said: list[str]) -> None:
    report = caught(tmp_path, SUPPORT / "fp8_sabotage", *said, SABOTAGE=sabotage)
    if "displaced" in sabotage:
        # The gate before the executor still resets the caches, so answers are right: the missing calls give it away.
        assert LEDGER in report.failed
    [workdir] = tmp_path.glob("flashpatch-verify-*")
    if sabotage == "stale_binding":
        return  # a ledger cannot show it: no update is known, so none of its evidence is due
    own = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    command = [Path(sys.executable).with_name("flashpatch-verify"), "--live", workdir / "ledger", "--json"]
    live = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=limit(400))
    assert live.returncode == 1, f"--live does not see it:\n{live.stdout}{live.stderr}"
