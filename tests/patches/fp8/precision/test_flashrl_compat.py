"""FlashRL's environment variables and FlashRL itself: mapped, refused by name, or a conflict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import warm
from machine import limit
from vllm_lab import environment

from flashpatch import PatchError
from flashpatch.patches.fp8.precision import flashrl_compat
from flashpatch.patches.fp8.precision.fleet import Entry


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("FLASHRL_")]:
        monkeypatch.delenv(name)


def entries(precision: str = "fp8", scheme: str = "", tables=()) -> tuple[Entry, ...]:
    return flashrl_compat.entries(precision, scheme, list(tables))


def refused(*args, **kw) -> str:
    with pytest.raises(PatchError) as caught:
        entries(*args, **kw)
    return str(caught.value)


def test_nothing_set_is_our_own_options() -> None:
    assert entries() == (Entry("fp8"),)
    assert entries("bf16", "ignored") == (Entry("bf16"),)
    assert entries("fp8", "fp8_per_tensor") == (Entry("fp8", "fp8_per_tensor"),)
    assert entries(tables=[{"precision": "bf16"}, {"precision": "fp8"}]) == (Entry("bf16"), Entry("fp8"))


@pytest.mark.parametrize("name", ["fp8", "fp8_vllm", "fp8_fast", "fp8_vllm_fast"])
def test_a_precision_that_agrees(name: str, monkeypatch) -> None:
    monkeypatch.setenv("FLASHRL_CONFIG", name)
    assert entries("fp8") == (Entry("fp8"),)
    assert "asks for fp8, FLASHPATCH for bf16" in refused("bf16")


def test_bf16(monkeypatch) -> None:
    monkeypatch.setenv("FLASHRL_CONFIG", "bf16")
    assert entries("bf16") == (Entry("bf16"),)
    assert "Set FLASHPATCH=bf16" in refused("fp8")


def test_a_file_and_our_own_fleet(monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("configs:\n- {fn: bf16}\n- {fn: fp8}\n")
    monkeypatch.setenv("FLASHRL_CONFIG", str(path))
    assert entries() == (Entry("bf16"), Entry("fp8"))
    assert entries(tables=[{"precision": "bf16"}, {"precision": "fp8"}]) == (Entry("bf16"), Entry("fp8"))
    assert "different fleets" in refused(tables=[{"precision": "fp8"}])


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FLASHRL_CONFIG", "int8", "'int8' cannot be had"),
        ("FLASHRL_CONFIG", "org/repo/flashrl_config.yaml", "nothing is downloaded here"),
        ("FLASHRL_CONFIG", "/no/such/file.yaml", "neither a precision of FlashRL nor a file"),
        ("FLASHRL_TEST_RELOAD", "some/model", "flashpatch-verify fp8"),
        ("FLASHRL_TYPO", "1", "not a known variable of FlashRL"),
    ],
)
def test_refused_by_name(variable: str, value: str, said: str, monkeypatch) -> None:
    monkeypatch.setenv(variable, value)
    message = refused()
    assert variable in message and said in message


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FLASHRL_LOGGING_LEVEL", "DEBUG"),
        ("FLASHRL_LOGGING_FILE", "flashrl.log"),
        ("FLASHRL_LOGGING_CONFIGURE", "1"),
        ("FLASHRL_LMHEAD_FP32", "0"),
        ("FLASHRL_LMHEAD_FP32", "1"),
    ],
)
def test_mapped_or_harmless(variable: str, value: str, monkeypatch) -> None:
    monkeypatch.setenv(variable, value)
    assert entries() == (Entry("fp8"),)
    [found] = flashrl_compat.counterparts()
    assert found.mapped and found.how


def test_every_variable_that_flashrl_reads_is_known() -> None:
    """The list is that of flash-llm-rl 1.0.3, grepped for ``FLASHRL_`` in its sources."""
    read = ("CONFIG", "LMHEAD_FP32", "LOGGING_FILE", "LOGGING_LEVEL", "TEST_RELOAD")
    found = flashrl_compat.counterparts({f"FLASHRL_{name}": "fp8" for name in read})
    assert [one.variable for one in found] == [f"FLASHRL_{name}" for name in read]
    assert all("not a known variable" not in one.how for one in found)


CONFLICT = """
import sys, types
from flashpatch.patches.fp8.precision import flashrl_compat as flashrl
flashrl.check_not_active()
{beside}
try:
    flashrl.check_not_active()
except flashrl.PatchError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ("sys.modules['flash_rl'] = types.ModuleType('flash_rl')", ""),
        (
            "sys.modules['flash_rl.vllm_patch'] = types.ModuleType('x')",
            "flash_rl.vllm_patch has been imported",
        ),
        (
            "vllm = sys.modules['vllm'] = types.ModuleType('vllm')\n"
            "vllm.LLM = type('LLM', (), {'beforeflashrl__init__': None})",
            "vllm.LLM carries its mark beforeflashrl__init__",
        ),
    ],
    ids=["idle", "imported", "patched"],
)
def test_flashrl_beside_us(beside: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONFLICT.format(beside=beside)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout and bool(said) == bool(done.stdout)
    assert not said or "flashrl cleanup" in done.stdout


@pytest.mark.vllm
def test_no_engine_opens_where_flashrl_has_patched_vllm(tmp_path: Path) -> None:
    """FlashRL was there first: nothing of ours is installed, and the engine's door says who is in the way."""
    package = tmp_path / "flash_rl"
    package.mkdir()
    (package / "__init__.py").write_text("from flash_rl import vllm_patch")
    (package / "vllm_patch.py").write_text("import vllm\nvllm.LLM.beforeflashrl__init__ = vllm.LLM.__init__")
    code = """
import flash_rl, flashpatch
flashpatch.enable("fp8")
from vllm.engine.arg_utils import EngineArgs
try:
    EngineArgs(model=".").create_engine_config()
except flashpatch.PatchError as error:
    print(error)
"""
    env = environment.clean(paths=(tmp_path,), FLASHPATCH_LEDGER=str(tmp_path / "ledger"))
    done = warm.run(warm.VLLM, ["-c", code], env=env, cwd=tmp_path, timeout=limit(300))
    assert "conflicts with flash_rl.vllm_patch, which is active in this process" in done.stdout, done.stderr[
        -2000:
    ]
