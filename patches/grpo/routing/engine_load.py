"""Read how loaded an engine says it is, from the metrics that vLLM and SGLang serve over HTTP."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from dataclasses import dataclass

_NAMES = {
    "vllm:num_requests_running": "running",
    "sglang:num_running_reqs": "running",
    "vllm:num_requests_waiting": "waiting",
    "sglang:num_queue_reqs": "waiting",
}
_LINE = re.compile(r"^([a-z]+:\w+)(?:\{[^}]*\})? ([-+.\w]+)$", re.MULTILINE)


@dataclass(frozen=True)
class EngineLoad:
    """Hold what an engine has: requests that it generates, and those that wait inside it for a slot or for cache."""

    running: int
    waiting: int


def parse(text: str) -> EngineLoad | None:
    """Return the load in Prometheus's text format, summed over a server's engines; None if it says nothing of it."""
    found: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        if name in _NAMES:
            found[_NAMES[name]] = found.get(_NAMES[name], 0.0) + float(value)
    if len(found) < 2:
        return None
    return EngineLoad(int(found["running"]), int(found["waiting"]))


async def ask(server: str, timeout: float = 2.0) -> EngineLoad | None:
    """Return a server's load; None when it serves no metrics, or does not answer in time.

    Args:
        server: host and port, as verl names its servers.
        timeout: seconds.
    """

    def read() -> str:
        with urllib.request.urlopen(f"http://{server}/metrics", timeout=timeout) as answer:
            return answer.read().decode(errors="replace")

    try:
        return parse(await asyncio.to_thread(read))
    except (OSError, ValueError):
        return None
