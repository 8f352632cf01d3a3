"""Real worker processes behind a registry, and the hand that kills and stops them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from flashpatch.patches.grpo.standalone.registry import Registry, WorkerLost


class Connection:
    """One worker's socket, as the registry's handle."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: Counter[str]
    ) -> None:
        self.reader, self.writer, self.counts = reader, writer, counts
        self.open: dict[int, asyncio.Future[dict]] = {}
        self.ids = itertools.count()
        self.closed = False

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.closed:
            raise WorkerLost("connection closed")
        number = next(self.ids)
        self.open[number] = asyncio.get_running_loop().create_future()
        try:
            self.writer.write((json.dumps({**request, "id": number}) + "\n").encode())
            answer = await self.open[number]
        finally:
            self.open.pop(number, None)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    async def listen(self) -> None:
        try:
            while line := await self.reader.readline():
                answer = json.loads(line)
                waiting = self.open.get(answer["id"])
                if waiting is None or waiting.done():
                    self.counts["late"] += 1
                else:
                    waiting.set_result(answer)
        except ConnectionError:
            pass
        finally:
            self.closed = True
            for waiting in self.open.values():
                if not waiting.done():
                    waiting.set_exception(WorkerLost("connection closed"))
            self.writer.close()


async def settled() -> None:
    """Let all tasks of this loop go on until each waits for something that is not this loop's own doing."""
    for _ in range(200):
        await asyncio.sleep(0)


async def send(handle: Connection, payload: dict[str, Any]) -> dict[str, Any]:
    return await handle.ask(payload)


async def ping(handle: Connection) -> None:
    await handle.ask({"ping": True})


class Fleet:
    """Worker processes that register themselves when they connect, and again after a restart."""

    def __init__(self, folder: Path, registry: Registry) -> None:
        self.socket = str(folder / "fleet")
        self.registry = registry
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.counts: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Fleet:
        self.server = await asyncio.start_unix_server(self._connected, self.socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.registry.close()
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.server.close()
        for task in self.tasks:
            task.cancel()

    def start(self, name: str) -> None:
        script = str(Path(__file__).with_name("grpo_worker.py"))
        self.processes[name] = subprocess.Popen([sys.executable, "-I", "-S", script, self.socket, name])

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes[name].pid, number)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()
        self.counts["killed"] += 1

    async def ready(self, number: int) -> None:
        while len(self.registry.pool.workers) < number:
            await asyncio.sleep(0.01)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        connection = Connection(reader, writer, self.counts)
        task = asyncio.create_task(connection.listen())
        self.tasks.add(task)
        await self.registry.register(hello["hello"], connection)
