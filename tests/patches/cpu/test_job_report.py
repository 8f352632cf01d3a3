"""The report of a real job: verl with fp8 rollouts on two replicas, each sync audited."""

import json
import os
import subprocess
import sys

import pytest
from machine import limit

pytestmark = pytest.mark.verl


def test_the_report_of_a_job_has_what_its_processes_did(fp8_job, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    ledger = ["--ledger", str(fp8_job.folder / "ledger")]
    code = "import sys; from flashpatch.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code]
    run = {"env": env, "capture_output": True, "text": True, "check": True, "timeout": limit(120)}
    job = json.loads(subprocess.run([*command, "report", "--json", *ledger], **run).stdout)
    # an update before the first step and one after each, on both replicas; versions in order on each
    assert job["verdict"] == "proven", job["problems"]
    workers = [lane for lane in job["lanes"] if "worker" in lane["process"]]
    assert {lane["replica"] for lane in workers} == {1, 2}
    for lane in workers:
        assert [segment[2:] for segment in lane["segments"]] == [[version, version] for version in range(4)]
    updates = [update for update in job["updates"] if update["role"] == "target"]
    assert [update["outcome"] for update in updates] == ["committed"] * 6
    assert all(0 < update["load"] + update["commit"] <= update["seconds"] for update in updates)
    assert len(job["syncs"]) == 3
    for sync in job["syncs"]:
        assert 0 < max(sync[phase] for phase in ("gather", "transfer", "load", "process")) <= sync["total"]
        assert sync["bytes"] > 0
    charts = {chart["id"]: chart for chart in job["charts"]}
    assert {"mismatch", "steps", "memory", "audit"} <= set(charts)
    [gap] = [line for line in charts["mismatch"]["lines"] if line["label"] == "mismatch/k3"]
    assert len(gap["points"]) == 2
    assert any(sentence.startswith("Staleness") for sentence in job["not_recorded"])
    page = tmp_path / "job.html"
    subprocess.run([*command, "report", "-o", str(page), *ledger], **run)
    assert page.stat().st_size > 200_000
