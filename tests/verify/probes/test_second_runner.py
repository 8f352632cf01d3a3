"""The families' own proofs on vLLM's second model runner, which is its default on GPUs."""

import os
from pathlib import Path

import pytest
from verify_command import verify
from vllm_lab import environment

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
    said = verify(name, tmp_path, {**kept, **environment.V2, **own}, 580).proven()
    assert said.proofs
    calls = {patch["id"]: patch["calls"] for patch in said.family["patches"]}
    assert calls[called] and not calls[idle]
