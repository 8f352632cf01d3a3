"""The probe of LoRA adapters, on real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from machine import limit

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"
PAGEABLE = "import amx_standin\namx_standin._prepare_torch = lambda: None\n"
"""A module that takes the stand-in for pinned memory away."""


def run(folder: Path, environment: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The command, and what it says of the part."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "lora", "--json"],
        env={**environment, "TMPDIR": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit(400),
    )
    [part] = json.loads(done.stdout)["families"]
    assert part["name"] == "lora" and all(proof["subject"] == "lora" for proof in part["proofs"])
    return done, part


def judge(folder: Path, environment: dict[str, str]) -> None:
    done, part = run(folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two, three, base, merged, bad, _ = part["proofs"]
    assert {proof["evidence"] for proof in (one, two, three, base)} == {"largest difference of logprobs 0"}
    assert "off by" in merged["evidence"] and "but the weight is" in bad["evidence"]
    assert not list(folder.glob("flashpatch-verify-*")), "nothing is left behind"


@pytest.mark.vllm
def test_on_vllm(tmp_path: Path) -> None:
    judge(tmp_path, {key: value for key, value in os.environ.items() if not key.startswith("FLASHPATCH")})


@pytest.mark.sglang(least="0.5.21")
@pytest.mark.full
def test_on_sglang(tmp_path: Path) -> None:
    import sglang_lab

    judge(tmp_path, sglang_lab.environment(tmp_path))


@pytest.mark.sglang(least="0.5.21")
@pytest.mark.full
def test_a_machine_without_pinned_memory_is_named(tmp_path: Path) -> None:
    import sglang_lab

    environment = sglang_lab.environment(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(PAGEABLE)
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done, part = run(tmp_path, environment)
    assert done.returncode != 0
    engines = part["proofs"][0]
    assert not engines["ok"] and "pinned memory" in engines["evidence"], engines
