"""The cache of `examples/world`'s converted model: whole or not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_FILE = Path(__file__).parents[2] / "examples" / "world" / "smollm.py"


@pytest.fixture
def smollm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with an empty cache, its package taken as installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("world_example_smollm", _FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.version = lambda package: "1"
    module._gguf = lambda: tmp_path / "weights.gguf"
    return module


def _files(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def test_a_conversion_that_fails_leaves_nothing(smollm: ModuleType, tmp_path: Path) -> None:
    def fail(source: Path, to: Path) -> None:
        to.mkdir()
        (to / "config.json").write_text("{")
        raise OSError("no space left on device")

    smollm._convert = fail
    with pytest.raises(OSError, match="no space left"):
        smollm.checkpoint()
    assert _files(tmp_path / "cache") == []


def test_the_first_of_two_processes_wins(smollm: ModuleType, tmp_path: Path) -> None:
    def convert(text: str, to: Path) -> None:
        to.mkdir()
        (to / "config.json").write_text(text)

    def second(source: Path, to: Path) -> None:
        smollm._convert = lambda source, to: convert("first", to)
        smollm.checkpoint()
        convert("second", to)

    smollm._convert = second
    kept = smollm.checkpoint()
    assert (kept / "config.json").read_text() == "first"
    assert len(_files(tmp_path / "cache")) == 1
