"""The metrics, and the view in a terminal, of a job of real processes."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_page import write_run
from machine import limit

from flashpatch import registry
from flashpatch.verify import live
from flashpatch.verify.job import collect, page, prometheus
from flashpatch.verify.read_events import Recorded


def families(text: str) -> dict:
    parser = pytest.importorskip("prometheus_client.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def test_prometheus_reads_the_metrics(flashpatch) -> None:
    text = flashpatch("metrics").stdout
    found = families(text)
    samples = {}
    for sample in (one for family in found.values() for one in family.samples):
        [what] = [sample.labels[one] for one in ("outcome", "phase", "arm") if one in sample.labels] or [None]
        samples[sample.name, what] = sample.value
    assert samples["flashpatch_weight_updates_total", "committed"] == 3
    assert samples["flashpatch_weight_updates_total", "abandoned"] == 1
    assert samples["flashpatch_sync_seconds", "gather"] == 0.5
    assert samples["flashpatch_speculation_choices_total", "3_1_4"] == 16
    assert samples["flashpatch_mismatch_k3_nats", None] == 2e-5
    assert samples["flashpatch_policy_version", None] == 3
    assert samples["flashpatch_run_proven", None] == 0, "its processes were killed"
    for name, family in found.items():
        assert family.documentation and family.type in ("gauge", "counter")
        assert {sample.labels["run"] for sample in family.samples} == {"job-1"}, name


def test_the_file_is_replaced(flashpatch, tmp_path: Path) -> None:
    (tmp_path / "job.prom").write_text("old")
    assert flashpatch("metrics", "job-1", "-o", "job.prom").stdout == "", "cron mails what is printed"
    assert (tmp_path / "job.prom").read_text().startswith("# HELP")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_labels_are_escaped_and_names_of_metrics_follow_the_conventions() -> None:
    labels = prometheus._labels({"role": 'a"b\\c\nd'})
    assert labels == 'role="a\\"b\\\\c\\nd"'
    [sample] = families(f"flashpatch_process_proven{{{labels}}} 1\n")["flashpatch_process_proven"].samples
    assert sample.labels == {"role": 'a"b\\c\nd'}
    units = ("_seconds", "_bytes", "_total", "_tokens", "_versions", "_nats")
    without = {"process_alive", "process_proven", "processes_missing", "policy_version", "run_proven"}
    for name, (kind, help, *_) in page.said()["metrics"].items():
        assert name.endswith(units) or name.removeprefix("flashpatch_") in without
        assert name.endswith("_total") == (kind == "counter") and help.endswith(".")


def test_the_view_is_printed_once_into_a_pipe(flashpatch) -> None:
    text = flashpatch("watch", COLUMNS="200").stdout
    assert "Job job-1" in text and "0 of 3 processes alive, 4 updates, 2 syncs" in text
    assert text.count("committed") == 3 and "ConnectionError: gone" in text
    assert "Tokens per speculative step" in text and "1.8" in text


def test_the_live_view_follows_a_job_to_its_end(tmp_path: Path) -> None:
    job = """
import sys, time
from flashpatch import engine, ledger
ledger.boot()
ledger.role("worker", rank=0)
for version in range(1, 4):
    ledger.note(policy_version=version)
    ledger.event("update", outcome="committed", version=version, role="target", seconds=0.5, load_seconds=0.1,
                 commit_seconds=0.1)
    print(version, flush=True)
    sys.stdin.readline()"""
    env = {**os.environ, "FLASHPATCH_LEDGER": str(tmp_path), "FLASHPATCH_RUN": "r"}
    env |= {"TERM": "xterm", "COLUMNS": "150"}
    running = subprocess.Popen([sys.executable, "-c", job], env=env, stdin=-1, stdout=-1, text=True)
    assert running.stdout.readline() == "1\n"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "flashpatch", "watch", "--every", "0.1"]
    watch = subprocess.Popen(command, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = _read_until(ours, "1 of 1 process alive, 1 update, ")
    running.stdin.write("\n")
    running.stdin.flush()
    seen += _read_until(ours, "2 updates")
    running.communicate("\n\n", timeout=limit(60))
    seen += _read_until(ours, "0 of 1 process alive, 3 updates")
    assert "committed" in seen
    with contextlib.suppress(OSError):  # the other end is closed
        while os.read(ours, 65536):
            pass
    assert watch.wait(limit(60)) == 0


def _read_until(file: int, wanted: str) -> str:
    deadline, text = time.monotonic() + limit(60), ""
    while wanted not in text:
        assert time.monotonic() < deadline, text[-2000:]
        text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(file, 65536).decode(errors="replace"))
    return text


def test_two_processes_of_one_host_and_pid_are_told_apart(tmp_path) -> None:
    folder = write_run(tmp_path / "run", 2)
    [worker] = (path for path in folder.glob("row-*-2-*.json"))
    row = json.loads(worker.read_text())
    row["start"], row["error"] = "77", "it broke"
    worker.with_name(f"row-{row['host']}-2-77.json").write_text(json.dumps(row))
    job = Recorded(folder)
    found = collect.job(job, registry.patches())
    told = {one["start"]: (one["name"], one["verdict"]) for one in found["processes"] if one["pid"] == 2}
    assert told["77"][1] == "not proven" and len({name for name, _ in told.values()}) == 2
    metrics = prometheus.text(job, live.judge(job.run, registry.patches()))
    lines = [line.rpartition(" ")[0] for line in metrics.splitlines()]
    assert len(lines) == len(set(lines)) and any('start="77"' in line for line in lines)
