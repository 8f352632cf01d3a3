"""Small real processes that keep a ledger, with an engine that is one counter."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from machine import limit

PRELUDE = """
import os, sys, time, types
engine = types.ModuleType("flashpatch.engine")
engine.calls = 0
def snapshot():
    entry = {"state": "live", "detail": "", "calls": engine.calls, "target": "toy:f", "tested": True}
    return {"patches": {"toy.toy.f": entry}, "versions": {"toy": "1.0"}, "error": None}
engine.snapshot = snapshot
sys.modules["flashpatch.engine"] = engine
os.register_at_fork(after_in_child=lambda: setattr(engine, "calls", 0))
from flashpatch import ledger
def call(times=1):
    for _ in range(times):
        engine.calls += 1
        ledger.touch(now=engine.calls == 1)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@pytest.fixture
def start(home: Path, tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Start a script in a process of its own; its standard streams are pipes of text."""

    def start(code: str, **env: str) -> subprocess.Popen:
        script = tmp_path / "script.py"
        script.write_text(PRELUDE + dedent(code))
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FLASHPATCH")}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        env = {**clean, "FLASHPATCH_LEDGER": str(home), **env}
        return subprocess.Popen([sys.executable, str(script)], env=env, text=True, **pipes)

    return start


@pytest.fixture
def finish(start) -> Callable[..., str]:
    """Run a script to its end, which must be clean, and give its standard output."""

    def finish(code: str, **env: str) -> str:
        out, err = start(code, **env).communicate(timeout=limit(60))
        assert err == ""
        return out

    return finish
