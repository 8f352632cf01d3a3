"""A throw-away framework and a third-party family for it, both installed as a user's would be."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import toy_sources
import warm
from machine import limit

ENGINE = """
class Engine:
    policy = 0

    def update(self, policy):
        self.policy = policy
        return policy

    def generate(self):
        return self.policy"""

FAMILY = '''
import os, subprocess, sys
from flashpatch import ledger
from flashpatch.verify.proof import Proof
from flashpatch.record import Contract, Family, Patch

JOB = """
import os, subprocess, sys
from toyfw.engine import Engine
engine = Engine()
engine.update(41)
print(engine.generate())"""

def update(original, engine, policy):
    ledger.role("worker")
    ledger.note(updates=ledger.notes().get("updates", 0) + 1)
    return original(engine, policy + 1)

def probe(nonce, workdir):
    command = [sys.executable, "-c", os.environ.get("TOY_JOB", JOB)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout.strip()
    return [Proof("toy", "the update adds one", said == "42", said)]

def patch(what, target, **fields):
    return Patch(id=f"toy.toyfw.{what}", targets=(target,), requires="toyfw>=1", scope=frozenset({"worker"}),
                 why="", how="", remove_when="", tested=("1.0",), **fields)

FAMILY = Family("toy", "adds one", (
    patch("update", "toyfw.engine:Engine.update", wrapper=update, evidence="update",
          contract=Contract(params=("policy",))),
    patch("fault", "toyfw.engine:Engine.generate", wrapper=lambda original, engine: original(engine),
          evidence="fault"),
), probe=probe)
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory for PYTHONPATH with framework ``toyfw`` 1.0 and family ``toy``."""
    site = toy_sources.site(tmp_path / "site", "1.0", ENGINE)
    (site / "toyfw" / "__init__.py").write_text("")  # it is imported here
    (site / "toyfamily.py").write_text(FAMILY)
    info = site / "toyfamily-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toyfamily\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[flashpatch.patches]\ntoy = toyfamily:FAMILY\n")
    return site


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a Python program with the framework and the family installed and a ledger of its own."""

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FLASHPATCH")}
        given = {"PYTHONPATH": str(site), "FLASHPATCH_LEDGER": str(tmp_path / "ledger"), "NO_COLOR": "1"}
        env = {**inherited, **given, "TMPDIR": str(tmp_path), **env}
        return warm.run(warm.PLAIN, arguments, env=env, cwd=tmp_path, timeout=limit(120))

    return run


@pytest.fixture
def verify(run) -> Callable[..., subprocess.CompletedProcess]:
    """``flashpatch-verify`` with these arguments and variables."""
    command = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"
    return lambda *arguments, **env: run("-c", command, *arguments, **env)
