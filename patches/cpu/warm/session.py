"""Start a server for the Ray node that this process is about to start."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flashpatch.patches.cpu.warm import server

logger = logging.getLogger("flashpatch.cpu")
HERE = Path(__file__).parent
LONGEST_SHEBANG = 120  # bytes that every kernel reads of a script's first line
LONGEST_SOCKET = 100  # bytes of a socket's path


_running: list[subprocess.Popen[bytes]] = []
"""Servers that end by themselves; kept, since a forgotten process warns."""


class Session:
    """One server, as the driver sees it.

    Attributes:
        script: path of the script that stands for the interpreter.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.script = str(folder / server.SCRIPT)
        self._folder = folder
        self._process = process
        self._followed = False

    def follow(self, raylet: int, job: str) -> None:
        """Let the server serve a job's workers, and stop it until `ray_started`.

        Ray ends a raylet whose agents have not started within 15 seconds, so that they have the cores for now.

        Args:
            raylet: the raylet's process id.
            job: Ray's id for the job.
        """
        self._followed = True
        _running.append(self._process)
        try:
            self._process.stdin.write(f"{raylet} {job}\n".encode())
            self._process.stdin.close()
        except OSError as error:
            logger.warning("Ray's workers start without a fork: their server has ended (%s)", error)
        self._process.send_signal(signal.SIGSTOP)

    def ray_started(self) -> None:
        """Let the server go on; end it if no raylet was started for it."""
        if self._followed:
            self._process.send_signal(signal.SIGCONT)
        else:
            self._close()

    def _close(self) -> None:
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def write_script(folder: Path) -> str:
    """Write the script that stands for the interpreter; returns its path."""
    script = folder / server.SCRIPT
    script.write_text(
        f"{_first_line()}\nimport sys\nsys.path.insert(0, {str(HERE)!r})\nimport launcher\n"
        f"launcher.main({str(folder / server.SOCKET)!r}, {sys.executable!r})\n"
    )
    script.chmod(0o700)
    return str(script)


def start(environment: Mapping[str, str]) -> Session | None:
    """Start a server whose imports see ``environment``; None, with a warning, where it cannot work."""
    folder = Path(tempfile.mkdtemp(prefix="flashpatch-"))
    script = write_script(folder)
    if len(_first_line()) > LONGEST_SHEBANG or " " in sys.executable or len(script) > LONGEST_SOCKET:
        trouble = f"{sys.executable} or {folder} is too long a path, or has blanks"
    elif not os.access(script, os.X_OK):
        trouble = f"scripts in {folder} cannot be executed"
    else:
        flags = subprocess._args_from_interpreter_flags()
        command = [sys.executable, *flags, str(HERE / "server.py"), str(folder), json.dumps(sys.path)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=dict(environment), process_group=0
        )
        return Session(folder, process)
    shutil.rmtree(folder, ignore_errors=True)
    logger.warning("Ray's workers start without a fork: %s", trouble)
    return None


def _first_line() -> str:
    return f"#!{sys.executable} -IS"
