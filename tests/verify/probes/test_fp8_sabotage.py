"""FlashPatch broken in one way at a time under a real engine: verify fails and says what is wrong."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import limit
from tree import SUPPORT

import flashpatch
import flashpatch.patches
import flashpatch.verify

pytestmark = [pytest.mark.vllm, pytest.mark.full]

TIMEOUT = limit(400)
COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"
SITECUSTOMIZE = SUPPORT / "fp8_sabotage"


@pytest.fixture
def verify(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """``flashpatch-verify`` with these arguments, ``path`` first on PYTHONPATH, and these variables."""

    def verify(*arguments: str, path: Path, **variables: str) -> subprocess.CompletedProcess:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
        return subprocess.run(
            [sys.executable, "-P", "-c", COMMAND, *arguments],
            env={**inherited, "PYTHONPATH": str(path), "TMPDIR": str(tmp_path), **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=limit(TIMEOUT),
        )

    return verify


@pytest.fixture
def doctored(tmp_path: Path) -> Callable[[str, str, str], Path]:
    """A directory for PYTHONPATH with FlashPatch in which one text of one file is another."""

    def doctored(file: str, text: str, other: str) -> Path:
        site = tmp_path / "site"
        for package in (flashpatch, flashpatch.patches, flashpatch.verify):
            source, target = Path(package.__file__).parent, site.joinpath(*package.__name__.split("."))
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        path = site / "flashpatch" / file
        before = path.read_text()
        assert before.count(text) == 1, f"{file} has changed: write this sabotage anew"
        path.write_text(before.replace(text, other))
        return site

    return doctored


def caught(done: subprocess.CompletedProcess, *said: str) -> dict:
    """The report of a verification that failed and says all of ``said``."""
    assert done.returncode == 1, done.stdout + done.stderr
    for words in said:
        assert words in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout)


def failed(report: dict) -> set[str]:
    """The behaviours that were not observed."""
    [family] = report["families"]
    return {proof["what"] for proof in family["proofs"] if not proof["ok"]}


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
                "fp8.vllm.worker_execute_model was never called in worker",
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
        ("stale_binding", ["fp8.vllm.initialize_model was never called in worker"]),
    ],
)
def test_sabotage_is_caught(verify, tmp_path, sabotage, said):
    report = caught(verify("fp8", "--json", path=SITECUSTOMIZE, SABOTAGE=sabotage), *said)
    if "displaced" in sabotage:
        # The gate before the executor still resets the caches, so answers are right: the missing calls give it away.
        assert "the ledger shows the calls in driver, engine core and worker" in failed(report)
    [workdir] = tmp_path.glob("flashpatch-verify-*")
    if sabotage == "stale_binding":
        return  # a ledger cannot show it: no update is known, so none of its evidence is due
    live = verify("--live", str(workdir / "ledger"), "--json", path=tmp_path)
    assert live.returncode == 1, f"--live does not see it:\n{live.stdout}{live.stderr}"


def test_a_wrapper_on_the_wrong_class_is_caught(verify, doctored):
    right, wrong = 'f"{WORKER}.execute_model"', '"vllm.v1.worker.worker_base:WorkerBase.execute_model"'
    site = doctored("patches/fp8/vllm/worker.py", right, wrong)
    caught(verify("fp8", "--json", path=site), "fp8.vllm.worker_execute_model was never called in worker")


def test_a_hook_that_raises_is_caught(verify, doctored):
    site = doctored("patches/fp8/vllm/model_loader.py", "    site.wrap(_initialize)\n", "    1 / 0\n")
    report = caught(
        verify("fp8", "--json", path=site), "fp8.vllm.initialize_model is failed: ZeroDivisionError"
    )
    assert "an engine opens, and its parameters are those of fp8" in failed(report)


def test_an_update_that_does_nothing_is_caught_though_every_patch_is_live(verify, doctored):
    honest = "result = managed.load(functools.partial(_with_positional, original, args), weights, **kwargs)"
    lazy = f"{honest} if managed.state == 'loading' else list(weights)"
    report = caught(
        verify("fp8", "--json", path=doctored("patches/fp8/refit/model_registry.py", honest, lazy))
    )
    assert failed(report) == {
        "an update to other weights equals a fresh engine on them",
        "reload_weights back equals the answers before",  # raises: nothing has come
    }
