"""The recipes for GPUs, which are not run here: their shell, their Dockerfile, and that each says so."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gpu_recipes import GPU, SCRIPTS, recorded
from tree import TREE

from flashpatch import registry

DOCKERFILE = GPU / "Dockerfile"
SHELL_SCRIPTS = sorted(TREE.glob("examples/**/*.sh"))


def tool(name: str) -> str:
    """A command that tests/requirements/check.txt installs; skips where it is not installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    # those for a CPU source a file that sets and uses variables for them
    severity = "style" if script in SCRIPTS else "error"
    command = [tool("shellcheck"), "--shell=bash", f"--severity={severity}", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_runs_unmodified_verl_with_flashpatch_in_front(script: Path, tmp_path: Path) -> None:
    recipe = recorded(script, tmp_path, "trainer.total_epochs=1")
    assert recipe.module == "verl.trainer.main_ppo" and recipe.overrides[-1] == "trainer.total_epochs=1"
    for name in recipe.variables["FLASHPATCH"].split(","):
        registry.family_of(name)
    assert recorded(script, tmp_path, FLASHPATCH="bf16").variables["FLASHPATCH"] == "bf16"


@pytest.mark.parametrize("file", [*SCRIPTS, DOCKERFILE], ids=lambda path: path.name)
def test_it_says_that_it_was_not_run(file: Path) -> None:
    assert re.search(r"^# NOT (RUN|BUILT): this project has ", file.read_text(), re.M)


def test_only_a_known_rollout_engine_is_taken(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "ROLLOUT": "trtllm"}
    done = subprocess.run(["bash", GPU / "eagle_7b.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "choose vllm or sglang" in done.stderr


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with what they take; continued lines are joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = [line.partition(" ") for line in joined.splitlines() if line]
    return [(name, rest.strip()) for name, _, rest in parts]


class TestDockerfile:
    def test_hadolint_has_nothing_to_say(self) -> None:
        done = subprocess.run([tool("hadolint"), DOCKERFILE], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout

    def test_its_base_is_one_image_and_no_other(self) -> None:
        [base] = [rest for name, rest in instructions() if name == "FROM"]
        assert re.fullmatch(r"vllm/vllm-openai:v\d+\.\d+\.\d+@sha256:[0-9a-f]{64}", base)
        makefile = (TREE / "Makefile").read_text()
        version = re.search(r"v(\d+\.\d+\.\d+)@", base)[1]
        assert f"$(PAIRED)/.vllm: VLLM := {version}" in makefile
        assert re.search(r"--no-deps (verl==\S+)", DOCKERFILE.read_text())[1] in makefile

    @pytest.mark.slow
    def test_what_it_copies_is_enough_to_install(self, tmp_path: Path) -> None:
        """A wheel of the copied sources has the files of one of the whole tree."""
        pytest.importorskip("setuptools")
        context = tmp_path / "context"
        for name, rest in instructions():
            if name == "COPY":
                *sources, destination = rest.split()
                assert sources and all((TREE / source).exists() for source in sources), rest
                if destination.startswith("/opt/flashpatch"):
                    self._copy(sources, context / destination.removeprefix("/opt/flashpatch").strip("/"))
        whole = tmp_path / "whole"
        left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "docs")
        shutil.copytree(TREE, whole, ignore=left_out)
        assert self._wheel(context, tmp_path / "a") == self._wheel(whole, tmp_path / "b")

    @staticmethod
    def _copy(sources: list[str], into: Path) -> None:
        for source in sources:
            if (TREE / source).is_dir():  # as Docker does: the content of a folder, not the folder
                shutil.copytree(
                    TREE / source, into, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
                )
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(TREE / source, into)

    @staticmethod
    def _wheel(source: Path, into: Path) -> list[str]:
        wheel = "-m pip wheel -qq --no-deps --no-build-isolation -w".split()
        command = [sys.executable, *wheel, into, source]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [wheel] = into.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(archive.namelist())
        assert any(name.endswith("flashpatch.pth") for name in names)
        return names
