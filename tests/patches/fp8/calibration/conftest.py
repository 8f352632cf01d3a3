"""Make each model once per run."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

if all(map(find_spec, ("torch", "transformers", "safetensors"))):
    import profile_lab
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bf16 checkpoint of a family."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = profile_lab.build(tmp_path_factory.mktemp("bf16") / family, family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def pairs(bf16, tmp_path_factory: pytest.TempPathFactory):
    """A bf16 checkpoint, a quantized one, and the scales between them; made once per kind. Do not change
    them."""
    made = {}

    def get(family: str, **how):
        key = (family, *sorted(how.items()))
        if key not in made:
            other = tmp_path_factory.mktemp("quantized") / family
            made[key] = bf16(family), other, profile_lab.quantize(bf16(family), other, family, **how)
        return made[key]

    return get


@pytest.fixture
def twins(pairs, tmp_path: Path):
    """Copies of a Qwen2 pair that a test may damage."""
    import shutil

    model, other, _ = pairs("qwen2")
    return shutil.copytree(model, tmp_path / "model"), shutil.copytree(other, tmp_path / "other")
