"""Which of the numbers that a trainer logs are kept for a report of the job."""

import math
import os
import subprocess
import sys
from pathlib import Path

import run_events
from machine import limit

CODE = """
from flashpatch import engine, ledger
from flashpatch.patches._shared import step_metrics
ledger.boot()
data = {"mismatch/k3": 0.00123456789, "timing_s/step": 3, "stream/staleness/mean": float("nan"), "eagle/x": True,
        "response/text": "hello", "critic/advantages/max": 1.0}
step_metrics.record(data, 7)
step_metrics.record({"val-core/reward": 1.0}, 8)
step_metrics.record({f"timing_s/{number}": 1.0 for number in range(500)}, 9)
"""


def test_finite_numbers_of_known_names_are_kept(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLASHPATCH")}
    env = {**clean, "FLASHPATCH_LEDGER": str(tmp_path), "FLASHPATCH_RUN": "r"}
    subprocess.run([sys.executable, "-c", CODE], env=env, check=True, timeout=limit(60))
    [process], _ = run_events.read(tmp_path / "r")
    first, many = process.events
    assert first["values"] == {"mismatch/k3": 0.00123457, "timing_s/step": 3.0}
    assert (first["step"], first["sample"]) == (7, True)
    assert len(many["values"]) == 150 and all(map(math.isfinite, many["values"].values()))
