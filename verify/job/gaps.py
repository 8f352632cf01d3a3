"""Say in sentences what a job did not record, and why a part of its report is empty or incomplete."""

from __future__ import annotations

from typing import Any

_CHARTS = {
    "acceptance": "Acceptance of drafts: no engine recorded any. The family eagle records it while its bandit runs.",
    "arms": "Chosen speculative configurations: none recorded. The family eagle records them.",
    "mismatch": "Mismatch between rollout and trainer: none recorded. fp8, int8 and bf16 record it under verl, where "
    "verl logs it.",
    "audit": "Audits of weights: none recorded. The family fsdp records them under verl.",
    "staleness": "Staleness of tokens: none recorded. The trainer mode stream_async of the family grpo records it.",
    "memory": "Memory: none recorded. It is read at each weight update, for the process as a whole; memory of "
    "accelerators is not.",
}
_COUNTED = {
    "untimed": "When {untimed} processes took their policy: they recorded versions, and no times.",
    "silent": "Times of {silent} of {all} processes: nothing happened in them that is timed, or FLASHPATCH_EVENT_BYTES was 0.",
    "dropped": "{dropped} old events, for which their files had no room (FLASHPATCH_EVENT_BYTES is bytes per process): "
    "what is shown of those processes begins later than they did.",
    "lost": "{lost} events, while the file system of the ledger did not answer.",
    "dropped_samples": "{dropped_samples} old samples, for which there was no room either.",
    "unreadable": "{unreadable} lines that cannot be read, as a killed process leaves one.",
    "left_out": "{left_out} further lines of charts with more than twelve are recorded and not drawn.",
}
_BESIDE = {"acceptance": ("trained",), "memory": ("device_memory", "host_memory")}


def sentences(found: dict[str, Any]) -> list[str]:
    """Return one sentence per thing that is not known of this job.

    Args:
        found: what `collect.job` has gathered.
    """
    charts = {chart["id"] for chart in found["charts"]}
    said = [
        text for id, text in _CHARTS.items() if id not in charts and not charts & set(_BESIDE.get(id, ()))
    ]
    if not found["updates"]:
        said.insert(0, "Weight updates: none recorded.")
    if not found["syncs"]:
        said.insert(
            1,
            "Syncs and their phases: none recorded. The families fp8, int8 and bf16 record them under verl.",
        )
    counts = {
        **found["recorded"],
        "untimed": sum(not lane["timed"] for lane in found["lanes"]),
        "silent": sum(not process["events"] for process in found["processes"]),
        "all": len(found["processes"]),
        "left_out": sum(chart["lines_left_out"] for chart in found["charts"]),
    }
    return said + [text.format(**counts) for name, text in _COUNTED.items() if counts[name]]
