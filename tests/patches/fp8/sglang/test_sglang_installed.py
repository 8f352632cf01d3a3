"""The records against the installed SGLang, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import sglang_lab as lab

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(("family", "least"), [("fp8", 16), ("eagle", 14)])
def test_all_is_installed_and_undone_without_a_trace(family: str, least: int, tmp_path: Path) -> None:
    seen = lab.bare(tmp_path, ["undo", dict(family=family)], env={"STANDIN_AMX": "1"})
    assert seen.done, str(seen)
    [found] = seen.steps
    assert found["states"] == ["installed"]
    assert found["replaced"] == found["restored"] == found["count"] >= least


@pytest.mark.parametrize(
    ("name", "quantization", "says"),
    [
        pytest.param("fp8", "fp8", "", marks=pytest.mark.full),
        pytest.param("bf16", None, "", marks=pytest.mark.full),
        ("fp8_channel", "PatchError", "not available on SGLang"),
    ],
)
def test_the_precision_is_the_engines_where_none_was_asked_for(
    name: str, quantization: str | None, says: str, models: Path, tmp_path: Path
) -> None:
    given = dict(device="cpu", model_path=lab.checkpoint(models, "llama", 0))
    seen = lab.bare(tmp_path, ["arguments", dict(given=given)], flashpatch=name, env={"STANDIN_AMX": "1"})
    assert seen.done, str(seen)
    [(found, message)] = seen.steps
    assert found == quantization and says in message, message
