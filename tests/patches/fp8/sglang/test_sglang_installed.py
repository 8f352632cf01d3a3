"""Of two generations of patches one stands aside; which precision the engine gets; without an engine."""

import ast
import importlib.util
import re
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


def test_no_embedding_of_an_image_outlives_the_policy_that_computed_it(tmp_path: Path) -> None:
    seen = lab.bare(tmp_path, ["embeddings", {}], env={"STANDIN_AMX": "1"})
    assert seen.done, str(seen)
    assert seen.steps == [[1, True, 0]]
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"
    caches = {
        f"{file.stem}:{target.id}"
        for folder in ("managers", "mem_cache", "model_executor", "speculative")
        for file in (root / folder).rglob("*.py")
        for node in ast.parse(file.read_text()).body
        for target in getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(target, ast.Name) and re.search("_cache|^cache", target.id)
    }
    embeddings = "mm_utils:embedding_cache" if lab.VERSION < (0, 5, 17) else "mm_schedule:embedding_cache"
    assert caches - {"multi_tokenizer_mixin:_cached_output_fields"} == {embeddings}, (
        "say whether it depends on weights, and who empties it"
    )
