"""Of two generations of patches one stands aside; which precision the engine gets; without an engine."""

from pathlib import Path

import pytest
import sglang_lab as lab

pytestmark = pytest.mark.sglang


def test_the_other_generation_stands_aside(tmp_path: Path) -> None:
    """It says so, and nothing is refused: the engine's own argument class can be used."""
    other = "sglang" if lab.OLD else "sglang_0_5_12"
    seen = lab.bare(tmp_path, ["states", dict(family="fp8", framework=other)], env={"STANDIN_AMX": "1"})
    assert seen.done, str(seen)
    [states] = seen.steps
    assert set(states) == {f"superseded(those of {lab.FRAMEWORK}, which are for the installed version)"}


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
