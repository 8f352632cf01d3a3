"""The table of patches that tests' jobs showed live, from hand-made ledgers."""

import json

import seen_live
from damaged_ledger import ROW


def test_due_and_called_by_job(tmp_path):
    step = "fp8.vllm.worker_execute_model"
    idle = {**ROW, "pid": 7, "patches": {step: {**ROW["patches"][step], "state": "installed", "calls": 0}}}
    for job, value in {"test_a0": ROW, "fp8-job0": idle}.items():
        folder = tmp_path / "base" / job / "ledger" / "r"
        folder.mkdir(parents=True)
        (folder / "row-h-1-5.json").write_text(json.dumps(value))
    found = seen_live.seen(tmp_path / "base")
    assert found[step] == {"due": ["fp8-job", "test_a"], "live": ["test_a"]}
    file = tmp_path / "seen.json"
    file.write_text(json.dumps(found))
    lines = seen_live.table([file]).splitlines()
    assert f"| `{step}` | once a step was taken | test_a |" in lines
    assert lines[-1].endswith("1 were seen live in these.")
