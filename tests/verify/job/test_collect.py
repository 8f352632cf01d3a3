"""What is gathered of a job of three real, killed processes, and of hand-made runs."""

import json

import pytest
from job_page import write_run

from flashpatch import registry
from flashpatch.verify.job import collect, series
from flashpatch.verify.read_events import Recorded


@pytest.fixture
def found(flashpatch) -> dict:
    return json.loads(flashpatch("report", "--json").stdout)


def test_processes_updates_and_syncs_are_there(found: dict) -> None:
    roles = sorted("+".join(process["roles"]) for process in found["processes"])
    assert roles == ["driver", "engine-core", "worker"] and found["alive"] == 0
    assert found["verdict"] == "not proven" and not found["running"]
    assert found["problems"][0].startswith("the job ended without a word: driver ")
    assert [update["outcome"] for update in found["updates"]] == 3 * ["committed"] + ["abandoned"]
    assert [(sync["step"], sync["gather"], sync["total"]) for sync in found["syncs"]] == [
        (1, 0.5, 1.5),
        (2, 0.5, 1.5),
    ]
    assert found["began"] <= found["updates"][0]["t"] <= found["ended"] <= found["generated"]


def test_the_lane_of_a_worker_has_its_versions(found: dict) -> None:
    [lane] = found["lanes"]
    assert [segment[2:] for segment in lane["segments"]] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    stops = [segment[1] for segment in lane["segments"]]
    assert stops == sorted(stops) and lane["timed"]
    assert [text for _, text in lane["marks"]] == ["abandoned: ConnectionError: gone"]


def test_incidents_are_in_order_and_complete(found: dict) -> None:
    kinds = {incident["kind"] for incident in found["incidents"] if incident["t"] is not None}
    assert kinds == {"refused", "update abandoned", "error"}


def test_measurements_and_what_is_missing(found: dict) -> None:
    charts = {chart["id"]: chart for chart in found["charts"]}
    assert set(charts) == {
        *("acceptance", "arms", "mismatch", "staleness", "steps", "reward", "memory", "audit", "trained_rate")
    }
    shares = {line["label"].split(",")[0]: line["points"][-1][1] for line in charts["arms"]["lines"]}
    assert shares == {"3_1_4": 0.8, "disable": 0.2}
    assert [(charts[id]["by"], charts[id]["lines"][0]["points"]) for id in ("reward", "steps")] == [
        ("step", [[1.0, 0.1], [2.0, 0.1]]),
        ("step", [[1.0, 2.0], [2.0, 2.0]]),
    ]
    assert charts["memory"]["by"] == "time"
    assert found["not_recorded"] == []


def test_a_run_without_events_says_what_is_not_known(tmp_path) -> None:
    folder = write_run(tmp_path / "run", updates=1)
    for path in folder.glob("events-*"):
        path.unlink()
    found = collect.job(Recorded(folder), registry.patches())
    said = "\n".join(found["not_recorded"])
    for what in ("Weight updates", "Syncs", "Acceptance", "Mismatch", "Audits", "Staleness", "Memory"):
        assert what in said
    assert "Times of 2" in said
    assert [lane["timed"] for lane in found["lanes"]] == [False]
    assert "they recorded versions, and no times" in said


def test_what_a_file_had_no_room_for_is_said(tmp_path) -> None:
    folder = write_run(tmp_path / "run", updates=1)
    path = folder / "events-made-up-2-7.jsonl"
    dropped = {"n": 0, "t": 1.0, "event": "dropped", "events": 7, "samples": 2, "by": {"update/committed": 7}}
    path.write_text(json.dumps(dropped) + "\n" + path.read_text() + '{"n": 3, "t')
    found = collect.job(Recorded(folder), registry.patches())
    counts = {"processes": 1, "dropped": 7, "dropped_samples": 2, "lost": 0, "unreadable": 1}
    assert found["recorded"] | {"events": 0} == {"events": 0, **counts}
    said = [one for one in found["not_recorded"] if one.startswith(("7 old", "2 old samples", "1 lines"))]
    assert len(said) == 3


def test_thousands_of_versions_are_joined_and_none_is_lost(tmp_path) -> None:
    folder = write_run(tmp_path / "run", updates=10_001)
    found = collect.job(Recorded(folder), registry.patches())
    [lane] = found["lanes"]
    assert len(lane["segments"]) <= 401 and lane["segments"][-1][3] == 10_001
    for before, after in zip(lane["segments"], lane["segments"][1:], strict=False):
        assert before[1] == after[0] and before[3] + 1 == after[2]
    assert len(found["updates"]) == 10_000 and "1 older updates" in str(found["not_recorded"])


def test_long_lines_keep_their_extremes() -> None:
    points = [(float(t), 0.0) for t in range(10_000)]
    points[4321] = (4321.0, 9.0)
    thinned = series.thinned(points)
    assert len(thinned) <= 1200 and (4321.0, 9.0) in thinned
    assert thinned == sorted(thinned)


def test_an_unknown_run_and_an_empty_ledger_are_errors_with_advice(flashpatch, tmp_path) -> None:
    assert "The newest runs there are: job-1" in flashpatch("report", "nonsense", code=2).stderr
    assert "whose Python has FlashPatch" in flashpatch("report", "--ledger", str(tmp_path), code=1).stderr
