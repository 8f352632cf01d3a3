"""Write the run of a large job that never ran, and open its page in a headless Chromium."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_BEGAN = 1_750_000_000.0


def find_browser() -> str | None:
    """Return the command of a Chromium; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for path in map(shutil.which, names) if path), None)


def dump(browser: str, page: Path, *options: str) -> str:
    """Open a page in a headless browser without network; return its document once it is drawn.

    Raises:
        subprocess.CalledProcessError: the browser failed.
        AssertionError: it printed a message of the page's console."""
    with tempfile.TemporaryDirectory(prefix="flashpatch-browser-") as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        command += ["--enable-logging=stderr", "--window-size=1280,2400", *options]
        command += ["--dump-dom", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    return done.stdout


def write_run(folder: Path, processes: int, updates: int, metrics: int = 200) -> Path:
    """Write the rows and events of a made-up finished run; return ``folder``.

    ``folder``: the run's directory, to be made; ``processes``: their number: a driver, and replicas of an engine core and 7
    workers; ``updates``: of all workers together; ``metrics``: number of training steps of which the driver kept metrics."""
    folder.mkdir(parents=True)
    workers = [pid for pid in range(2, processes + 1) if (pid - 2) % 8] or [processes]
    each = max(1, updates // len(workers))
    steps = [_BEGAN + 20 + 60 * number for number in range(max(each, metrics))]
    for pid in range(1, processes + 1):
        core = 2 + (pid - 2) // 8 * 8
        roles, rank = (["engine-core"], {}) if pid == core else (["worker"], {"rank": (pid - 2) % 8 - 1})
        events: list[dict[str, Any]] = []
        if pid == 1:
            roles, rank, core = ["driver"], {}, 0
            events = _driver_events(steps[:metrics])
        elif pid in workers:
            number = each + (updates - each * len(workers) if pid == workers[-1] else 0)
            events = [_update(steps[i % len(steps)] + pid % 7, i + 1) for i in range(number)]
        _write_process(folder, pid, core if pid != core else 1, roles, rank, events)
    return folder


def _driver_events(steps: list[float]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, t in enumerate(steps, 1):
        phases = {"gather": 0.4, "transfer": 0.3, "load": 0.9, "process": 0.2, "total": 1.7}
        sync = {f"timing_s/sync/{name}": seconds for name, seconds in phases.items()}
        found.append({"t": t, "event": "sync", "step": number, **sync, "sync/bytes": 1e9})
        values = {"mismatch/k3": 1e-3 / number, "stream/staleness/mean": 0.5, "timing_s/step": 55.0}
        values |= {"critic/score/mean": 1 - 1 / number, "rollout/spec_accept_rate": 0.5}
        found.append({"t": t + 1, "event": "metrics", "sample": True, "step": number, "values": values})
    return found


def _update(t: float, version: int) -> dict[str, Any]:
    took = {"seconds": 1.5, "load_seconds": 0.9, "commit_seconds": 0.2, "buckets": 5, "rss_bytes": 3 << 30}
    what = {"event": "update", "outcome": "committed", "role": "target", "version": version}
    return {"t": t, **what, **took}


def _write_process(
    folder: Path, pid: int, ppid: int, roles: list[str], rank: dict[str, int], events: list[dict[str, Any]]
) -> None:
    state = {"state": "live", "detail": "", "calls": 3, "target": "vllm:f", "tested": True}
    versions = [event["version"] for event in events if "version" in event]
    row = {
        **{"kind": "row", "run": folder.name, "host": "made-up", "pid": pid, "start": "7", "ppid": ppid},
        **{"argv0": "python", "roles": roles, "rank": rank, "versions": {"python": "3.11"}, "error": None},
        "patches": {"fp8.vllm.process_weights_after_loading": state} if "worker" in roles else {},
        "notes": {"policy_version": versions[-1]} if versions else {},
        **{"first_written": _BEGAN + pid % 11, "written": "2025-06-15T16:00:00+0000"},
    }
    (folder / f"row-made-up-{pid}-7.json").write_text(json.dumps(row))
    if events:
        lines = (json.dumps({"n": number, **event}) for number, event in enumerate(events, 1))
        (folder / f"events-made-up-{pid}-7.jsonl").write_text("".join(f"{line}\n" for line in lines))
