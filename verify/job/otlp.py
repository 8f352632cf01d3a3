"""Write a job as spans of OpenTelemetry, in the JSON encoding of its protocol (OTLP).

A collector takes the file as it is, at its HTTP receiver's ``/v1/traces``. Every process is a resource, every slice of the
job's trace a span; a moment, such as a refusal, is a span without length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from flashpatch.verify.job.source import Source
from flashpatch.verify.job.trace import trace

_FAULTS = ("refused", "error", "abandoned")
"""Names and outcomes of events whose span has the status of an error."""


def spans(source: Source, names: dict[tuple[str, int, str], str]) -> dict[str, Any]:
    """Return the job's spans as JSON of an ``ExportTraceServiceRequest``.

    Args:
        source: the run.
        names: host, pid and start to the name of a process.

    Returns:
        ``resourceSpans``, a process each. All spans have the trace id that is made of the run's id; times are
        nanoseconds since 1970.
    """
    found = trace(source, names)
    zero = found["otherData"]["began_unix_seconds"]
    by_process: dict[int, list[dict[str, Any]]] = {}
    for event in found["traceEvents"]:
        if event["ph"] in ("X", "i"):
            by_process.setdefault(event["pid"], []).append(event)
    trace_id = _digest(source.run.id, 16)
    return {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": _attributes(
                        {
                            "service.name": "flashpatch",
                            "service.instance.id": names[row.key],
                            "host.name": row.host,
                            "process.pid": row.pid,
                            "flashpatch.run": source.run.id,
                        }
                    )
                },
                "scopeSpans": [
                    {
                        "scope": {"name": "flashpatch"},
                        "spans": list(_spans(by_process[number], zero, trace_id)),
                    }
                ],
            }
            for number, row in enumerate(source.run.rows, 1)
            if number in by_process
        ]
    }


def _spans(events: list[dict[str, Any]], zero: float, trace_id: str) -> Iterator[dict[str, Any]]:
    for number, event in enumerate(events):
        begin = round(zero * 1e9) + event["ts"] * 1000
        failed = event["name"] in _FAULTS or event["args"].get("outcome") in _FAULTS
        span = {
            "traceId": trace_id,
            "spanId": _digest(f"{trace_id} {event['pid']} {number}", 8),
            "name": event["name"],
            "kind": 1,  # internal
            "startTimeUnixNano": str(begin),
            "endTimeUnixNano": str(begin + event.get("dur", 0) * 1000),
            "attributes": _attributes(event["args"]),
        }
        yield span | ({"status": {"code": 2}} if failed else {})


def _attributes(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
