"""A worker process of the chaos tests: answers requests over a Unix socket, one line of JSON each.

    python grpo_worker.py SOCKET NAME

A request ``{"id", "work", "boom"}`` is answered after ``work`` seconds with its id, the worker's name and
pid, or with an error. A ping is answered at once. Not a mock of anything: it dies, hangs and resumes as a
process does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys


async def main(socket: str, name: str) -> None:
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write((json.dumps({"hello": name}) + "\n").encode())

    async def serve(request: dict) -> None:
        if "ping" not in request:
            await asyncio.sleep(request["work"])
        answer = {"id": request["id"], "by": name, "pid": os.getpid()}
        if request.get("boom"):
            answer["error"] = "boom"
        writer.write((json.dumps(answer) + "\n").encode())

    at_work = set()
    while line := await reader.readline():
        task = asyncio.create_task(serve(json.loads(line)))
        at_work.add(task)
        task.add_done_callback(at_work.discard)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
