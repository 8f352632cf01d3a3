"""The families' own proofs on vLLM's second model runner, which is its default on GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import limit
from vllm_lab import environment

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"

pytestmark = [pytest.mark.vllm, pytest.mark.full]


@pytest.mark.parametrize(
    ("name", "called", "idle"),
    [
        ("bf16", "fp8.vllm.model_runner_v2_execute_model", "fp8.vllm.model_runner_execute_model"),
        ("eagle", "eagle.vllm.sample_tokens_v2", "eagle.vllm.sample_tokens"),
    ],
)
def test_a_live_engine_is_proven(tmp_path: Path, name: str, called: str, idle: str) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FLASHPATCH", "VLLM_"))}
    paths = [*map(str, environment.early_paths(environment.V2)), kept.pop("PYTHONPATH", "")]
    own = {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, name, "--json"],
        env={**kept, **environment.V2, **own},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(580),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [family] = json.loads(done.stdout)["families"]
    assert family["proofs"] and all(proof["ok"] for proof in family["proofs"])
    words = {patch["id"]: patch["state"]["word"] for patch in family["patches"]}
    assert words[called] == "live" and words[idle] == "installed"
