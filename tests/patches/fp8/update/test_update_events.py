"""What a process records of its weight updates: outcome, version, phases, and what was refused."""

import os
from pathlib import Path

import pytest
import run_events
import warm
from machine import limit
from tree import TREE

pytest.importorskip("torch")

BEGIN = """
import fp8_toys as toys
from flashpatch import engine, ledger
ledger.boot()
model = toys.engine("bare", atomic="model")
"""


def recorded(tmp_path: Path, code: str) -> list[dict]:
    """Run a script in a process with a ledger; return its events."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLASHPATCH")}
    env = {**clean, "FLASHPATCH_LEDGER": str(tmp_path / "ledger"), "FLASHPATCH_RUN": "r"}
    env["PYTHONPATH"] = str(TREE / "tests" / "support")
    warm.run(warm.TORCH, ["-c", BEGIN + code], env=env, cwd=tmp_path, timeout=limit(120)).check_returncode()
    [process], problems = run_events.read(tmp_path / "ledger" / "r")
    assert not problems
    return process.events


def test_updates_record_versions_and_phases(tmp_path: Path) -> None:
    weights = "toys.checkpoint({})"
    code = f"""
half = len({weights.format(1)}) // 2
model.update({weights.format(1)})
model.load({weights.format(2)}[:half])
import time; time.sleep(0.3)
model.load({weights.format(2)}[half:])
model.managed.finish()
"""
    first, second = recorded(tmp_path, code)
    assert (first["event"], first["outcome"], first["role"]) == ("update", "committed", "target")
    assert (first["version"], first["buckets"]) == (1, 1)
    assert (second["version"], second["buckets"]) == (2, 2)
    for event in (first, second):
        assert 0 < event["load_seconds"] + event["commit_seconds"] <= event["seconds"] + 1e-4
        assert event["rss_bytes"] > 1 << 20
    assert second["seconds"] - second["load_seconds"] - second["commit_seconds"] >= 0.3
    assert second["t"] - first["t"] >= second["seconds"] - 1e-3


def test_failures_and_refusals_are_recorded(tmp_path: Path) -> None:
    code = """
def fails(call):
    try:
        call()
    except Exception:
        return
    raise AssertionError("it must fail")
whole = toys.checkpoint(1)
fails(lambda: model.load(toys.broken_off(whole, 3)))
fails(lambda: model.update(whole[:-2]))
model.managed.begin()
model.managed.begin()
model.update(whole)
model.managed.asleep = True
fails(model.managed.begin)
"""
    broken, incomplete, replaced, done, refused = recorded(tmp_path, code)
    assert (broken["outcome"], broken["state"]) == ("abandoned", "ready")
    assert broken["problem"].startswith("ConnectionError")
    assert "did not come" in incomplete["problem"] or "incomplete" in incomplete["problem"]
    assert (replaced["outcome"], done["outcome"], done["version"]) == ("replaced", "committed", 1)
    assert refused["event"] == "refused" and "sleeps" in refused["problem"]
