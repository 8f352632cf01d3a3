"""The family's own proof says yes here, and no under sabotage."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")


import flow_lab
import probe_proofs
import warm_ranks
from machine import limit

from flashpatch.verify import cli
from flashpatch.verify.probes.flowrl import verl_probe

pytestmark = pytest.mark.verl

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(['flowrl', '--json']))"


def verify(folder: Path, **extra: str) -> tuple[int, dict, str]:
    """Exit code, the family's report, and what was said."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND],
        env=flow_lab.environment(folder, TMPDIR=str(folder), **extra),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit(flow_lab.LIMIT),
    )
    said = f"exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.startswith("{"), said
    (family,) = json.loads(done.stdout)["families"]
    return done.returncode, family, said


@pytest.fixture
def doctored(tmp_path: Path) -> Callable[[str, str, str], str]:
    """A directory for PYTHONPATH with FlashPatch in which one text of one file is another."""
    import flashpatch
    import flashpatch.patches
    import flashpatch.verify

    def doctored(file: str, text: str, other: str) -> str:
        site = tmp_path / "site"
        for package in (flashpatch, flashpatch.patches, flashpatch.verify):
            source, target = Path(package.__file__).parent, site.joinpath(*package.__name__.split("."))
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        path = site / "flashpatch" / "patches" / "flowrl" / file
        before = path.read_text()
        assert before.count(text) == 1, f"{file} has changed: write this sabotage anew"
        path.write_text(before.replace(text, other))
        return str(site)

    return doctored


def failed(family: dict) -> set[str]:
    return {proof["what"] for proof in family["proofs"] if not proof["ok"]}


def test_it_is_live_here(tmp_path, capsys):
    with warm_ranks.used() as patch:
        patch.setattr("os.environ", flow_lab.environment(tmp_path))
        code = cli.main(["flowrl", "--json"])
    said = capsys.readouterr()
    (family,) = json.loads(said.out)["families"]
    assert code == 0, said
    assert not failed(family) and not probe_proofs.missing(verl_probe, family["proofs"])


@pytest.mark.full
def test_it_is_live_in_new_interpreters(tmp_path):
    code, family, said = verify(tmp_path)
    assert code == 0, said
    assert not failed(family) and not probe_proofs.missing(verl_probe, family["proofs"])


@pytest.mark.full
def test_it_is_live_with_other_options(tmp_path):
    config = tmp_path / "own.toml"
    config.write_text('[flowrl]\nlog_z = "group"\nreward = "raw"\nbeta = 2.0\nlength = "sum"\n')
    code, family, said = verify(tmp_path, FLASHPATCH_CONFIG=str(config))
    assert code == 0, said
    (unsaid,) = probe_proofs.missing(verl_probe, family["proofs"])
    assert not failed(family) and unsaid.startswith("log")  # there is no partition function


@pytest.mark.full
def test_a_loss_that_forgets_the_reference_is_caught_though_every_patch_is_live(tmp_path, doctored):
    site = doctored("objective.py", " - over(ref_log_prob)", "")
    code, family, said = verify(tmp_path, PYTHONPATH=site)
    assert code == 1, said
    assert failed(family) == {"the loss is the paper's, computed in float64 without verl"}


@pytest.mark.full
@pytest.mark.parametrize(
    "file, text, other, what",
    [
        (
            "export.py",
            "dict(without_head(state_dict.items()))",
            "dict(state_dict)",
            "the rollout engine gets",
        ),
        ("partition_function.py", "if self.sharers is not None:", "if False:", "two ranks that share"),
        (
            "partition_function.py",
            "means.detach() if self._detach else means",
            "(means * 0).detach()",
            "log Z is that",
        ),
        # unrefused, the recipe goes on to verl, which stumbles over what it lacks
        (
            "verl_config.py",
            'if strategy not in (None, "fsdp", "fsdp2"):',
            "if False:",
            "verl's worker updates an actor",
        ),
        ("actor.py", "if head is None:\n        return", "if True:\n        return", "LoRA adapters learn"),
        (
            "advantage.py",
            'if chosen.reward == "raw":',
            'if chosen.reward != "raw":',
            "the driver's advantages",
        ),
        ("forward.py", "if held is not None:", "if False:", "verl's worker updates an actor"),
    ],
)
def test_other_sabotage_is_caught(tmp_path, doctored, file, text, other, what):
    code, family, said = verify(tmp_path, PYTHONPATH=doctored(file, text, other))
    assert code == 1, said
    assert any(proof.startswith(what) for proof in failed(family)), said
