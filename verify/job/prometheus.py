"""Write a job's state in Prometheus's text format, for a node exporter's textfile collector or any scraper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flashpatch.ledger import events
from flashpatch.ledger.runs import Row
from flashpatch.verify.job import page
from flashpatch.verify.job.source import Source
from flashpatch.verify.live import LiveReport

Sample = tuple[str, dict[str, str], float]


def text(source: Source, report: LiveReport) -> str:
    """Return the metrics of a job, from its rows and events and the verdict on it."""
    run = {"run": source.run.id}
    missing = sum(not process.present for process in report.processes)
    samples: list[Sample] = [("flashpatch_processes_missing", run, missing)]
    samples.append(("flashpatch_run_proven", run, report.ok))
    proven = {(one.host, one.pid, one.start): one.verdict == "ok" for one in report.processes}
    many = Counter((row.host, row.pid) for row in source.run.rows)
    for row in source.run.rows:
        who = {**run, "host": row.host, "pid": str(row.pid), "role": "+".join(row.roles) or "process"}
        if many[row.host, row.pid] > 1:
            who["start"] = row.start
        if row.node is not None:
            who["node"] = row.node.label
        samples.append(("flashpatch_process_proven", who, proven.get(row.key, False)))
        samples += [(name, {**who, **labels}, value) for name, labels, value in _of_process(row, source)]
    lines = []
    for name, (kind, help, *_) in page.said()["metrics"].items():
        mine = [sample for sample in samples if sample[0] == name]
        if mine:
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            lines += [_line(*sample) for sample in mine]
    return "".join(f"{line}\n" for line in lines)


def _of_process(row: Row, source: Source) -> Iterator[Sample]:
    process = source.events.of(row.key)
    if row.alive is not None:
        yield "flashpatch_process_alive", {}, row.alive
    for id, patch in sorted(row.patches.items()):
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


def _line(name: str, labels: dict[str, str], value: float) -> str:
    escapes = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
    written = ",".join(f'{label}="{text.translate(escapes)}"' for label, text in labels.items())
    return f"{name}{{{written}}} {float(value):.10g}"
