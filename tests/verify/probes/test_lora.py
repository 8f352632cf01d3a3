"""The probe of LoRA adapters, on real engines."""

import os
from pathlib import Path

import pytest
from verify_command import verify

PAGEABLE = "import amx_standin\namx_standin._prepare_torch = lambda: None\n"
"""A module that takes the stand-in for pinned memory away."""


def judge(folder: Path, environment: dict[str, str] | None = None) -> None:
    said = verify("lora", folder, environment).proven()
    assert said.family["name"] == "lora" and all(proof["subject"] == "lora" for proof in said.proofs)
    one, two, three, base, merged, bad, _ = said.proofs
    assert {proof["evidence"] for proof in (one, two, three, base)} == {"largest difference of logprobs 0"}
    assert "off by" in merged["evidence"] and "but the weight is" in bad["evidence"]
    assert not list(folder.glob("flashpatch-verify-*")), "nothing is left behind"


@pytest.mark.vllm
@pytest.mark.full
def test_on_vllm(tmp_path: Path) -> None:
    judge(tmp_path)


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
    said = verify("lora", tmp_path, environment)
    assert said.code != 0
    engines = said.proofs[0]
    assert not engines["ok"] and "pinned memory" in engines["evidence"], engines
