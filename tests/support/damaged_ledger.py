"""Write a ledger with damaged and forged files, and run every command that reads one on it."""

import contextlib
import copy
import io
import json
import random
import shutil
from pathlib import Path

from rich.console import Console

from flashpatch import cli, registry
from flashpatch.commands import report
from flashpatch.ledger import files
from flashpatch.verify import cli as verify_cli
from flashpatch.verify.job import collect, screen
from flashpatch.verify.read_events import Recorded

RUN = "r"

MARKUP = "[/] [red]x[/red] [link=http://h]y[/link] </script><b>z</b>"
TERMINAL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r\n\x00"

VALUES = [
    None, True, False, 0, 1, -1, 1.5, 1e17, 2**40, 2**70, -(2**70), 1e999, -1e999, float("nan"), "", "7", "x" * 3000,
    MARKUP, TERMINAL, "\ud800", "\u2028", [], {}, [[]], [MARKUP], {TERMINAL: TERMINAL}, {"a": [1e999]}, [None, 3],
]  # fmt: skip
BYTES = [b"", b"{", b"null", b"[]", b'"row"', b"\xff\xfe"]
BYTES += [b"[" * 100_000, b'{"a":' * 5000, b"9" * 5000, b"NaN"]

ROW = {
    "kind": "row",
    "run": RUN,
    "host": files.host(),
    "pid": 1 << 30,
    "start": "5",
    "ppid": 1,
    "argv0": "train.py",
    "title": "TaskRunner",
    "roles": ["worker", "engine-core"],
    "rank": {"rank": 0},
    "versions": {"python": "3.11", "vllm": "0.32"},
    "patches": {
        "fp8.vllm.worker_execute_model": {
            "state": "live", "detail": "", "calls": 3, "target": "vllm.x:y", "tested": True,
        },
        "fp8.vllm.collective_rpc": {"state": "skipped", "detail": "x", "calls": 0, "target": "", "tested": None},
    },
    "on": {"fp8": {"name": "int8", "options": {"precision": "int8"}}},
    "notes": {"policy_version": 2, "updates": 2, "steps": 1, "precision": "int8", "audit": {"sync": 1}},
    "error": "lost it",
    "first_written": 1.7e9,
    "written": "2026-11-24T10:00:00+0000",
}  # fmt: skip
EXPECTED = {
    "kind": "expect", "run": RUN, "host": files.host(), "pid": (1 << 30) + 1, "start": "", "roles": ["worker"],
    "families": ["fp8"], "by": 1,
}  # fmt: skip
EVENTS = [
    {"n": 0, "t": 1.7e9, "event": "dropped", "events": 3, "samples": 4, "by": {"update/committed": 2}},
    {"n": 1, "t": 1.7e9 + 1, "event": "update", "outcome": "committed", "version": 1, "role": "target", "seconds": 0.5,
     "load_seconds": 0.2, "commit_seconds": 0.1, "buckets": 2, "rss_bytes": 1 << 30},
    {"n": 2, "t": 1.7e9 + 2, "event": "refused", "what": "requests", "problem": "no policy", "repeats": 3},
    {"n": 3, "t": 1.7e9 + 3, "event": "sync", "step": 1, "timing_s/sync/total": 2.0, "timing_s/sync/gather": 1.0,
     "sync/bytes": 1e6, "sync/policy_version": 1},
    {"n": 4, "t": 1.7e9 + 4, "event": "metrics", "sample": True, "step": 1,
     "values": {"mismatch/k3": 0.01, "timing_s/step": 2.0, "stream/staleness/mean": 0.5}},
    {"n": 5, "t": 1.7e9 + 5, "event": "speculation", "sample": True, "drafted": 9, "accepted": 4,
     "acceptance_length": 1.4, "arms": {"3_1_4": 5, "disable": 1}},
    {"n": 6, "t": 1.7e9 + 6, "event": "audit", "failed": 1, "problem": "bit"},
    {"n": 7, "t": 1.7e9 + 7, "event": "drafter", "version": 1, "path": "/drafter-1", "before": 2.5},
    {"n": 8, "t": 1.7e9 + 8, "event": "adopted", "version": 1},
]  # fmt: skip


def mutated(value: dict, choose: random.Random) -> bytes:
    """Return a row or an event as JSON, with one to three of its values, keys or letters changed."""
    if choose.random() < 0.1:
        return choose.choice(BYTES)
    value = copy.deepcopy(value)
    for _ in range(choose.randint(1, 3)):
        _change(value, choose)
    text = json.dumps(value).encode()
    return text[: choose.randrange(len(text))] if choose.random() < 0.05 else text


def _change(value: dict | list, choose: random.Random) -> None:
    """Replace, remove or add something in a container, or in one that it holds."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if keys and choose.random() < 0.5:
        inner = value[choose.choice(keys)]
        if isinstance(inner, (dict, list)) and inner:
            return _change(inner, choose)
    what = copy.deepcopy(choose.choice(VALUES))
    if isinstance(value, list):
        value.append(what)
    elif keys and choose.random() < 0.8:
        value[choose.choice(keys)] = what
    elif keys and choose.random() < 0.5:
        del value[choose.choice(keys)]
    else:
        value[choose.choice([TERMINAL, MARKUP, "timing_s/x", "sync/x", "values", "seconds", "version"])] = (
            what
        )


def write(home: Path, count: int, choose: random.Random) -> None:
    """Write a run of ``count`` mutated rows and events in place of the one that is there."""
    folder = home / RUN
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "row-h-1-5.json").write_text(json.dumps(ROW))
    for number in range(count // 4):
        (folder / f"row-h-{number}-6.json").write_bytes(mutated(ROW, choose))
    for number in range(count // 4):
        (folder / f"expect-h-{number}-6.json").write_bytes(mutated(EXPECTED, choose))
    lines = [mutated(choose.choice(EVENTS), choose) for _ in range(count - 2 * (count // 4))]
    lines += [json.dumps(event).encode() for event in EVENTS]
    choose.shuffle(lines)
    pid, start, host = ROW["pid"], ROW["start"], files.host()
    (folder / f"events-{host}-{pid}-{start}.jsonl").write_bytes(b"\n".join(lines))
    (folder / f"row-{TERMINAL[1:9]}-3-3.json").write_bytes(b"{")
    (folder / f"events-{TERMINAL[1:9]}-3-3.jsonl").write_bytes(lines[0])


def outputs(home: Path, workdir: Path) -> dict[str, str]:
    """Return what each command prints or writes for that run; what one raises passes through."""
    ledger, found = ["--ledger", str(home)], {}
    page = workdir / "page.html"
    for name, command in {
        "report": ["report", RUN, *ledger, "-o", str(page)],
        "report --json": ["report", RUN, *ledger, "--json"],
        "metrics": ["metrics", RUN, *ledger],
        "watch": ["watch", RUN, *ledger, "--once"],
    }.items():
        found[name] = _printed(cli.main, command)
    found["page"] = page.read_text()
    for arguments in (["--live", str(home)], ["--live", str(home), "--json"]):
        found[" ".join(arguments[::2])] = _printed(verify_cli.main, arguments)
    tables = screen.view(collect.job(Recorded(home / RUN), registry.patches()), 60)
    found["screen"] = "".join(map(drawn, tables))
    return found


def drawn(table: report.Table) -> str:
    """Return a table as a terminal shows it."""
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system=None, width=300).print(report.drawn(table))
    return stream.getvalue()


def _printed(main, arguments: list[str]) -> str:
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            main(arguments)
        except SystemExit as end:
            assert end.code in (0, 1), said.getvalue()
    return out.getvalue() + ("" if "--json" in arguments else said.getvalue())
