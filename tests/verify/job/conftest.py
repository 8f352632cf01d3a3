"""A job of real processes: a driver, an engine core, and a worker that updates, is refused and is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import machine
import pytest
from machine import until

RUN = "job-1"

JOB = """
import os, sys, time
from flashpatch import engine, ledger
ledger.boot()
def update(version, **more):
    facts = dict(role="target", seconds=0.2, load_seconds=0.15, commit_seconds=0.01, buckets=2, rss_bytes=3 << 20)
    ledger.note(policy_version=version, updates=version)
    ledger.event("update", **{"outcome": "committed", "version": version, **facts, **more})
core = os.fork()
if core == 0:
    ledger.role("engine-core")
    ledger.event("refused", what="requests", problem="</script><b>rank 0 cannot serve & waits</b>")
    for number in range(3):
        ledger.sample("speculation", arm="3_1_4", drafted=30 * number, accepted=12 * number,
                      acceptance_length=1 + 0.4 * number, arms={"3_1_4": 8 * number, "disable": 2 * number})
    worker = os.fork()
    if worker == 0:
        ledger.role("worker", rank=0)
        for version in (1, 2, 3):
            update(version)
        ledger.event("update", outcome="abandoned", role="target", seconds=0.1, problem="ConnectionError: gone")
        ledger.event("audit", sync=1, failed=0, audited=1)
        ledger.flush()
        os.write(1, b"ready\\n")  # in one piece: three write here
        time.sleep(600)
    ledger.event("drafter", version=1, before=2.5)
    ledger.flush()
    os.write(1, b"ready\\n")  # in one piece: three write here
    time.sleep(600)
ledger.role("driver")
for step in (1, 2):
    phases = {"gather": 0.5, "transfer": 0.25, "load": 0.75, "process": 0.125, "total": 1.5}
    ledger.event("sync", step=step, **{f"timing_s/sync/{name}": value for name, value in phases.items()},
                 **{"sync/bytes": 1e6, "sync/policy_version": step})
    values = {"mismatch/k3": 1e-5 * step, "stream/staleness/mean": 0.5, "timing_s/step": 2.0, "critic/score/mean": 0.1, "rollout/spec_accept_rate": 0.5}
    ledger.sample("metrics", step=step, values=values)
ledger.event("error", what="weight sync", step=2, problem="the rollouts do not hold one policy")
ledger.flush()
os.write(1, b"ready\\n")  # in one piece: three write here
time.sleep(600)"""


@pytest.fixture(scope="session")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with one run, whose processes were killed."""
    home = tmp_path_factory.mktemp("job") / "ledger"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLASHPATCH")}
    env = {**clean, "FLASHPATCH_LEDGER": str(home), "FLASHPATCH_RUN": RUN}
    process = subprocess.Popen(
        [sys.executable, "-c", JOB], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert [process.stdout.readline() for _ in range(3)] == 3 * ["ready\n"], "each has written its row"
        until(lambda: sum(path.read_bytes().count(b"\n") for path in (home / RUN).glob("*.jsonl")) >= 16)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return home


@pytest.fixture
def flashpatch(tmp_path: Path, ledger: Path):
    """Run the command with this ledger; return what it printed."""

    def flashpatch(*arguments: str, code: int = 0, **env: str) -> subprocess.CompletedProcess:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FLASHPATCH")}
        env = {**clean, "FLASHPATCH_LEDGER": str(ledger), "NO_COLOR": "1", **env}
        done = machine.run([sys.executable, "-m", "flashpatch", *arguments], 60, env=env, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done

    return flashpatch
