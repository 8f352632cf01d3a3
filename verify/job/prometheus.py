"""Write a job's state in Prometheus's text format, for a node exporter's textfile collector or any scraper."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from flashpatch.ledger import events
from flashpatch.ledger.runs import Row
from flashpatch.verify.job import page
from flashpatch.verify.live import LiveReport
from flashpatch.verify.read_events import Recorded


def text(source: Recorded, report: LiveReport) -> str:
    """Return the metrics of a job, from its rows and events and the verdict on it."""
    run, found = _labels({"run": source.run.id}), defaultdict[str, list[str]](list)

    def add(name: str, labels: str, value: float) -> None:
        found[name].append(f"{name}{{{labels}}} {float(value):.10g}\n")

    add("flashpatch_processes_missing", run, sum(one.verdict == "missing" for one in report.processes))
    add("flashpatch_run_proven", run, report.ok)
    proven = {one.key: one.verdict == "ok" for one in report.processes}
    many = Counter((row.host, row.pid) for row in source.run.rows)
    for row in source.run.rows:
        who = {"host": row.host, "pid": str(row.pid), "role": "+".join(row.roles) or "process"}
        who |= {"start": row.start} if many[row.host, row.pid] > 1 else {}
        who |= {"node": row.node.label} if row.node is not None else {}
        of = f"{run},{_labels(who)}"
        add("flashpatch_process_proven", of, proven.get(row.key, False))
        for name, labels, value in _of_process(row, source):
            add(name, f"{of},{_labels(labels)}" if labels else of, value)
    known = page.said()["metrics"].items()
    heads = {name: f"# HELP {name} {help}\n# TYPE {name} {kind}\n" for name, (kind, help, *_) in known}
    return "".join(part for name, head in heads.items() if name in found for part in (head, *found[name]))


def _of_process(row: Row, source: Recorded) -> Iterator[tuple[str, dict[str, str], float]]:
    process = source.of(row.key)
    if row.alive is not None:
        yield "flashpatch_process_alive", {}, row.alive
    for id, patch in sorted(row.parts[0].items()):
        if patch["calls"]:
            yield "flashpatch_patch_calls_total", {"patch": id}, patch["calls"]
    if isinstance(row.notes.get("policy_version"), int):
        yield "flashpatch_policy_version", {}, row.notes["policy_version"]
    counts = Counter(process.dropped_kinds)
    counts.update(map(events.kind_of, process.events))
    last = {event["event"]: event for event in process.events}
    for kind, count in sorted(counts.items()):
        if kind.startswith("update/"):
            yield "flashpatch_weight_updates_total", {"outcome": kind.partition("/")[2]}, count
    for kind, name in (("refused", "refusals"), ("error", "errors"), ("sync", "syncs")):
        if counts.get(kind):
            yield f"flashpatch_{name}_total", {}, counts[kind]
    for name, (_, _, *sources) in page.said()["metrics"].items():
        for kind, label, key in sources:
            event = last.get(kind, {})
            value = event.get(key, event.get("values", {}).get(key))
            if isinstance(value, (int, float)) and (event.get("drafted") or key != "acceptance_length"):
                yield name, dict([label.split("=")]) if label else {}, value
    for arm, count in sorted(last.get("speculation", {}).get("arms", {}).items()):
        yield "flashpatch_speculation_choices_total", {"arm": str(arm)}, count
    if process.events:
        yield "flashpatch_events_dropped_total", {}, process.dropped


def _labels(labels: dict[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
    return ",".join(f'{label}="{text.translate(escapes)}"' for label, text in labels.items())
