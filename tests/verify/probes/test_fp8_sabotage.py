"""FlashPatch broken in one way at a time under a real engine: verify fails and says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import limit
from tree import SUPPORT
from verify_command import Said, doctored, verify

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


def test_a_wrapper_on_the_wrong_class_is_caught(tmp_path: Path) -> None:
    right, wrong = 'f"{WORKER}.execute_model"', '"vllm.v1.worker.worker_base:WorkerBase.execute_model"'
    site = doctored(tmp_path, "fp8/vllm/worker.py", right, wrong)
    caught(tmp_path, site, "fp8.vllm.worker_execute_model by any worker")


def test_a_hook_that_raises_is_caught(tmp_path: Path) -> None:
    site = doctored(tmp_path, "fp8/vllm/model_loader.py", "    site.wrap(_initialize)\n", "    1 / 0\n")
    report = caught(tmp_path, site, "fp8.vllm.initialize_model is failed: ZeroDivisionError")
    assert "an engine opens, and its parameters are those of fp8" in report.failed


def test_an_update_that_does_nothing_is_caught_though_every_patch_is_live(tmp_path: Path) -> None:
    honest = "result = managed.load(functools.partial(_with_positional, original, args), weights, **kwargs)"
    lazy = f"{honest} if managed.state == 'loading' else list(weights)"
    report = caught(tmp_path, doctored(tmp_path, "fp8/refit/model_registry.py", honest, lazy))
    assert report.failed >= {
        "an update to other weights equals a fresh engine on them",
        "reload_weights back equals the answers before",  # raises: nothing has come
    }
