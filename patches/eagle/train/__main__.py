"""Train in a process of its own: ``python -m flashpatch.patches.eagle.train SETTINGS-JSON``.

It reads commands as JSON lines from standard input and reports events as JSON lines on standard output, see `worker`;
anything that libraries print goes to standard error. When its input ends, the parent has ended, and so does it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from typing import Any, TextIO

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.train.worker import Worker


def _read_commands(stream: TextIO, commands: queue.Queue[dict[str, Any]]) -> None:
    for line in stream:
        with contextlib.suppress(ValueError):
            command = json.loads(line)
            if isinstance(command, dict) and "command" in command:
                commands.put(command)
    commands.put({"command": "exit"})


def main() -> int:
    """Run a worker on standard input and output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.umask(0o077)  # samples, checkpoints and drafters are this user's alone

    def report(event: dict[str, Any]) -> None:
        # the parent has ended, which the end of the input shows too
        with contextlib.suppress(OSError, ValueError):
            out.write(json.dumps(event, default=str) + "\n")

    try:
        settings = WorkerSettings.of(json.loads(sys.argv[1]))
        with contextlib.suppress(OSError):
            os.nice(settings.niceness)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        commands: queue.Queue[dict[str, Any]] = queue.Queue()
        worker = Worker(settings, report, commands)
    except (PatchError, OSError, ValueError, IndexError) as error:
        report({"event": "refused", "problem": str(error)})
        return 2
    threading.Thread(target=_read_commands, args=(sys.stdin, commands), name="commands", daemon=True).start()
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
