"""Distributions built once per run, and throw-away environments to install them in.

Nothing here needs a network: builds use the running environment's setuptools, and the new environments see
links to the running environment's copies of our few dependencies."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
EPOCH = "1700000000"  # seconds since 1970 that files in an archive bear
LENT = ("packaging", "rich", "markdown-it-py", "mdurl", "Pygments", "wrapt", "setuptools")
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv*", ".demo", "build", "dist", "*.egg-info", "__pycache__", ".hypothesis", ".*_cache"
)


class Environment:
    """A fresh virtual environment whose only installed distributions are the ones a test installs."""

    def __init__(self, home: Path, lent: Path) -> None:
        self.home = home
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        (self.site / "lent.pth").write_text(f"{lent}\n")
        self.before = set(self.site.iterdir())

    @property
    def site(self) -> Path:
        return next(self.home.glob("lib/python*/site-packages"))

    @property
    def added(self) -> set[str]:
        """Names at the top of site-packages that installing has added, metadata left out."""
        names = {path.name for path in set(self.site.iterdir()) - self.before}
        return {name for name in names if not name.endswith(".dist-info") and name != "__pycache__"}

    def pip(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.home / "bin" / "python", "-qq", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *command: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a console script, or ``python`` with arguments, with only ``env`` beside PATH and HOME."""
        clean = {"PATH": os.environ["PATH"], "HOME": str(self.home), "NO_COLOR": "1", **env}
        program = self.home / "bin" / command[0]
        return subprocess.run(
            [program, *command[1:]], cwd=cwd or self.home, env=clean, capture_output=True, text=True
        )

    def python(self, code: str, cwd: Path | None = None, **env: str) -> str:
        """Standard output of ``code``, which must succeed and leave standard error empty."""
        done = self.run("python", "-c", code, cwd=cwd, **env)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="session")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of links to the running environment's copies of what FlashPatch depends on."""
    folder = tmp_path_factory.mktemp("lent")
    for name in LENT:
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            if not top.endswith(".pth"):
                (folder / top).symlink_to(distribution(name).locate_file(top))
    return folder


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree: building in the tree itself would leave files there."""
    return shutil.copytree(TREE, tmp_path_factory.mktemp("source") / "tree", ignore=NOT_SOURCES)


@pytest.fixture(scope="session")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist of the tree and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree]
    env = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="session")
def new_environment(lent: Path, tmp_path_factory: pytest.TempPathFactory):
    return lambda: Environment(tmp_path_factory.mktemp("environment"), lent)


@pytest.fixture(scope="session")
def installed(new_environment, wheel: Path) -> Environment:
    """An environment with the wheel; tests share it and change nothing in it."""
    environment = new_environment()
    environment.pip("install", "--no-deps", wheel)
    return environment


@pytest.fixture(scope="session")
def editable(new_environment, tree: Path) -> Environment:
    """An environment with the tree's copy installed by ``pip install -e``; shared like ``installed``."""
    environment = new_environment()
    environment.pip("install", "--no-deps", "--no-build-isolation", "-e", tree)
    return environment
