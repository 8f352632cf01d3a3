"""Write a job's state in Prometheus's text format, for a node exporter's textfile collector or any scraper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from flashpatch.ledger import events
from flashpatch.ledger.runs import Row
from flashpatch.verify.job.collect import PHASES
from flashpatch.verify.job.source import Source

_TABLE = """
flashpatch_process_alive gauge 1 while the process runs, 0 after; absent for processes of other hosts.
flashpatch_process_proven gauge 1 if all that is due in the process was observed, else 0.
flashpatch_processes_missing gauge Processes that were expected and wrote nothing.
flashpatch_patch_calls_total counter Calls of a patch in a process.
flashpatch_policy_version gauge Version of the policy that the process holds.
flashpatch_weight_updates_total counter Weight updates by outcome: committed, abandoned or replaced.
flashpatch_weight_update_seconds gauge Seconds of the last weight update by phase: total, load or commit.
flashpatch_weight_update_timestamp_seconds gauge When the last weight update ended, since 1970.
flashpatch_refusals_total counter Refused updates, requests or engines; equal ones within a second count once.
flashpatch_errors_total counter Syncs after which the rollouts did not hold one policy.
flashpatch_syncs_total counter Syncs of trainer and rollouts.
flashpatch_sync_seconds gauge Seconds of the last sync by phase, of the slowest rank.
flashpatch_sync_bytes gauge Bytes that the last sync sent.
flashpatch_audits_failed_total counter Audits that found weights other than the trainer's.
flashpatch_draft_tokens_total counter Draft tokens that were verified.
flashpatch_accepted_draft_tokens_total counter Draft tokens that were accepted.
flashpatch_speculative_step_tokens gauge Mean tokens of a request's speculative step since the start.
flashpatch_speculation_choices_total counter Steps measured by speculative configuration (arm).
flashpatch_mismatch_k3_nats gauge Gap between rollout and trainer, an estimate of KL, at the last step.
flashpatch_staleness_versions gauge Mean age of the tokens trained on, in policy versions, last step.
flashpatch_step_seconds gauge Seconds of the trainer's last step.
flashpatch_resident_memory_bytes gauge Resident memory of the process at its last weight update.
flashpatch_events_dropped_total counter Events that a process had no room to keep."""
METRICS = {
    name: (kind, help) for name, kind, help in (row.split(" ", 2) for row in _TABLE.split("\n") if row)
}
"""Name to type and help of every metric that there may be. What a job did not record has no line."""

Sample = tuple[str, dict[str, str], float]


def text(source: Source, found: dict[str, Any]) -> str:
    """Return the metrics of a job, from its rows and events and what `flashpatch.verify.job.collect.job` returns for it."""
    run = {"run": source.run.id}
    missing = sum(process["verdict"] == "missing" for process in found["processes"])
    samples: list[Sample] = [("flashpatch_processes_missing", run, missing)]
    proven = {(one["host"], one["pid"], one["start"]): one["verdict"] == "ok" for one in found["processes"]}
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
    for name, (kind, help) in METRICS.items():
        mine = [sample for sample in samples if sample[0] == name]
        if mine:
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            lines += [_line(*sample) for sample in mine]
    return "".join(f"{line}\n" for line in lines)


def _of_process(row: Row, source: Source) -> Iterator[Sample]:
    process = source.of(row)
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
    yield from _last_values(last)
    if process.events:
        yield "flashpatch_events_dropped_total", {}, process.dropped


def _last_values(last: dict[str, dict[str, Any]]) -> Iterator[Sample]:
    update, sync, speculation = (last.get(name, {}) for name in ("update", "sync", "speculation"))
    values = last.get("metrics", {}).get("values", {})
    for phase, key in (("total", "seconds"), ("load", "load_seconds"), ("commit", "commit_seconds")):
        yield from _if("flashpatch_weight_update_seconds", update.get(key), phase=phase)
    yield from _if("flashpatch_weight_update_timestamp_seconds", update.get("t"))
    yield from _if("flashpatch_resident_memory_bytes", update.get("rss_bytes"))
    for phase in (*PHASES, "total"):
        yield from _if("flashpatch_sync_seconds", sync.get(f"timing_s/sync/{phase}"), phase=phase)
    yield from _if("flashpatch_sync_bytes", sync.get("sync/bytes"))
    yield from _if("flashpatch_audits_failed_total", last.get("audit", {}).get("failed"))
    yield from _if("flashpatch_draft_tokens_total", speculation.get("drafted"))
    yield from _if("flashpatch_accepted_draft_tokens_total", speculation.get("accepted"))
    if speculation.get("drafted"):
        yield from _if("flashpatch_speculative_step_tokens", speculation.get("acceptance_length"))
    for arm, count in sorted(speculation.get("arms", {}).items()):
        yield "flashpatch_speculation_choices_total", {"arm": str(arm)}, count
    yield from _if("flashpatch_mismatch_k3_nats", values.get("mismatch/k3"))
    yield from _if("flashpatch_staleness_versions", values.get("stream/staleness/mean"))
    yield from _if("flashpatch_step_seconds", values.get("timing_s/step"))


def _if(name: str, value: Any, **labels: str) -> Iterator[Sample]:
    if isinstance(value, (int, float)):
        yield name, labels, value


def _line(name: str, labels: dict[str, str], value: float) -> str:
    escapes = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
    written = ",".join(f'{label}="{text.translate(escapes)}"' for label, text in labels.items())
    return f"{name}{{{written}}} {float(value):.10g}"
