"""What a decode step of SGLang takes in FlashPatch's code: calls of Python, which are the same on a busy machine."""

import json
import statistics
from pathlib import Path

import pytest
import sglang_lab as lab

pytestmark = pytest.mark.sglang


def test_a_decode_step_takes_few_calls_of_flashpatchs_own(tmp_path: Path) -> None:
    seen = lab.run(
        tmp_path,
        model=lab.checkpoint(tmp_path, "qwen2", 1),
        steps=[["tokens", dict(count=24)]],
        flashpatch="bf16",
        env={"JOB_CALLS": str(tmp_path / "calls.json")},
    )
    assert seen.done, str(seen)
    calls = json.loads((tmp_path / "calls.json").read_text())
    assert len(calls) > 20 and 0 < statistics.median(calls) <= 10, calls
