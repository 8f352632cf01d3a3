"""Start, stop and restart the training process, and give it slices of time.

Nothing here blocks but `wait_idle` and `close`, which have time limits; nothing raises because the worker is
slow, dead or fails. Works without torch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any, Literal, TextIO

from flashpatch.patches.eagle.train.settings import WorkerSettings

logger = logging.getLogger("flashpatch.eagle")

State = Literal["down", "starting", "idle", "training", "given up"]
MODULE = "flashpatch.patches.eagle.train"


class Coordinator:
    """Run one training process.

    Args:
        settings: of the worker.
        start_limit: seconds until the worker must be ready.
        stop_limit: seconds until it must be idle after `stop`, or after its slice.
        restarts: how often a dead worker is restarted from its newest drafter, after 1, 2, 4 ... seconds.
            Counted anew after every slice that gave a drafter.
        environment: added to the worker's.

    Attributes:
        state: one of `State`.
        drafter: folder of the newest drafter, or None.
        figures: the worker's last report.
        counts: ``started``, ``slices`` (that ended), ``died``, ``killed``, ``drafters``, ``errors``, ``undelivered``
            (commands that could not be sent).
        problem: the last one, or ""."""

    def __init__(
        self,
        settings: WorkerSettings | Mapping[str, Any],
        start_limit: float = 180.0,
        stop_limit: float = 30.0,
        restarts: int = 3,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings if isinstance(settings, WorkerSettings) else WorkerSettings.of(settings)
        self.state: State = "down"
        self.drafter: Path | None = None
        self.figures: dict[str, Any] = {}
        self.counts: Counter[str] = Counter(started=0, died=0, killed=0, drafters=0, errors=0, undelivered=0)
        self.problem = ""
        self._start_limit, self._stop_limit = start_limit, stop_limit
        self._restarts, self._restarts_left, self._restart_at = restarts, restarts, 0.0
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()  # lines of the present worker
        self._errors: deque[str] = deque(maxlen=20)
        self._limit = self._deadline = inf  # seconds for which the worker may be in its state, and their end
        self._slice: dict[str, Any] | None = None  # asked for while the worker was starting
        self._orders: dict[str, Any] = {}
        self._lock = threading.RLock()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, while there is one."""
        return self._process.pid if self._process else None

    def start(self) -> bool:
        """Start the worker if it is down; return False when that fails. `poll` notices when it is ready."""
        with self._lock:
            if self._process is not None:
                return True
            try:
                Path(self.settings.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
                process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, self.settings.dump()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    bufsize=1,
                    env={**os.environ, **self._environment},
                    start_new_session=True,  # a terminal's Ctrl-C reaches the engine only
                )
            except OSError as error:
                self._warn(f"the trainer cannot be started: {error}")
                self._failed()
                return False
            os.set_blocking(process.stdin.fileno(), False)
            self._process, self._said = process, queue.SimpleQueue()
            self._errors.clear()
            self.counts["started"] += 1
            self._enter("starting", self._start_limit)
            self._readers = [
                threading.Thread(target=_read, args=args, name="flashpatch-trainer", daemon=True)
                for args in ((process.stdout, self._said.put), (process.stderr, self._errors.append))
            ]
            for reader in self._readers:
                reader.start()
            return True

    def train(self, seconds: float) -> bool:
        """Give the worker a slice of so many seconds at most, and start it if it is down; return False when it cannot
        train now."""
        command = {"command": "train", "seconds": seconds}
        with self._lock:
            self.poll()
            if self.state == "down" and time.monotonic() >= self._restart_at:
                self.start()
            if self.state == "starting":
                self._slice = command
                return True
            return self.state == "idle" and self._begin(command)

    def stop(self) -> bool:
        """Tell the worker to end its slice and write a drafter; `poll` notices that it is idle, or kills it in time."""
        with self._lock:
            self.poll()
            self._slice = None
            if self.state != "training":
                return self.state == "idle"
            self._enter("training", self._stop_limit)
            return self._send({"command": "stop"})

    def order(self, **orders: Any) -> None:
        """Send what the worker needs beside samples, if it is idle, and with each slice to come, until other orders come.

        Args:
            target: folder of the policy's present embedding and head."""
        with self._lock:
            self._orders |= orders
            if self.state == "idle":
                self._send({"command": "order", **self._orders})

    def poll(self) -> list[dict[str, Any]]:
        """Handle and return the worker's events since the last call. Never blocks, never raises."""
        with self._lock:
            return self._handle_events() + self._check_process()

    def wait_idle(self, limit: float) -> bool:
        """Stop the slice and wait until the worker is idle; kill it after ``limit`` seconds. Return whether it became
        idle by itself, or was not running."""
        self.stop()
        end, killed = time.monotonic() + limit, self.counts["killed"]
        while self.state == "training":
            self.poll()
            with self._lock:
                if time.monotonic() >= end and self.state == "training":
                    self._kill(f"the trainer was not idle within {limit:g} seconds")
            time.sleep(0.01)
        return self.counts["killed"] == killed

    def close(self, timeout: float = 10.0) -> None:
        """End the worker by a command; kill it after ``timeout`` seconds."""
        with self._lock:
            process = self._process
            if process is None:
                return
            self._send({"command": "exit"})
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.counts["killed"] += 1
        with self._lock:
            self._handle_events()
            self._process = None
            self._enter("down")

    def _begin(self, command: dict[str, Any]) -> bool:
        sent = self._send({**command, **self._orders})
        if sent:
            self._enter("training", command["seconds"] + self._stop_limit)
        return sent

    def _handle_events(self) -> list[dict[str, Any]]:
        found = []
        while not self._said.empty():
            with contextlib.suppress(ValueError):  # what a library printed
                event = json.loads(self._said.get())
                if isinstance(event, dict):
                    found.append(event)
                    self._handle(event)
        return found

    def _handle(self, event: dict[str, Any]) -> None:
        name = event.get("event")
        if name in ("ready", "training", "idle", "drafter"):
            self.figures = {**self.figures, **event}
        if name == "ready":
            self._enter("idle")
            if not self.settings.device:  # Ray hides every accelerator from a driver
                logger.warning("no device is named: the drafter is trained on %s", event.get("device"))
            command, self._slice = self._slice, None
            if command is not None:
                self._begin(command)
        elif name == "idle" and event.get("command", "train") == "train":
            self._enter("idle")
            self.counts["slices"] += 1
        elif name == "drafter":
            self._restarts_left = self._restarts
            self.drafter = Path(event["folder"])
            self.counts["drafters"] += 1
        elif name == "error":
            self.counts["errors"] += 1
            self._warn(f"the trainer could not {event.get('command')}: {event.get('problem')}")
        elif name == "refused":
            self._restarts_left = 0  # it would be refused again
            self._warn(f"the trainer refused its settings: {event.get('problem')}")

    def _check_process(self) -> list[dict[str, Any]]:
        """Notice that the worker died or passed a time limit; return its last events, handled."""
        process, now, last_events = self._process, time.monotonic(), []
        if process is None:
            if self.state == "down" and self._slice and now >= self._restart_at:
                self.start()
            return []
        code = process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(1.0)  # what it wrote last may still be in the pipe
            last_events = self._handle_events()
            self.counts["died"] += 1
            if code != 2 or self._restarts_left:  # else it has said why
                last = f": {self._errors[-1].strip()[:500]}" if self._errors else ""
                self._warn(f"the trainer died, exit {code}{last}")
            self._ended()
        elif now > self._deadline:
            self._kill(f"the trainer was {self.state} for more than {self._limit:g} seconds")
        return last_events

    def _kill(self, why: str) -> None:
        self._warn(why)
        self.counts["killed"] += 1
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # SIGKILL takes no longer, unless the kernel itself is stuck
        self._ended()

    def _ended(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process, self._said = None, queue.SimpleQueue()
        self._failed()

    def _failed(self) -> None:
        if self._restarts_left > 0:
            self._restart_at = time.monotonic() + 2.0 ** (self._restarts - self._restarts_left)
            self._restarts_left -= 1
            self._enter("down")
        else:
            self._warn(f"{self.problem}; no drafter is trained any more")
            self._enter("given up")

    def _enter(self, state: State, limit: float = inf) -> None:
        self.state, self._limit, self._deadline = state, limit, time.monotonic() + limit

    def _warn(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning("%s", problem)
        self.problem = problem

    def _send(self, command: dict[str, Any]) -> bool:
        line = (json.dumps(command) + "\n").encode()
        with contextlib.suppress(OSError, ValueError):  # it has ended, or does not read and the pipe is full
            if self._process is not None:
                os.write(self._process.stdin.fileno(), line)  # below PIPE_BUF: at once or not at all
                return True
        self.counts["undelivered"] += 1
        return False


def _read(stream: TextIO, take: Callable[[str], None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in stream:
            if line.strip():
                take(line)
