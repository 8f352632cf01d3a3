"""Run a Python command line: forked by the server if it agrees, else by a new interpreter.

Executed with ``-IS`` by the script that `session` writes; it imports nothing but the standard library.
"""

from __future__ import annotations

import array
import marshal
import os
import resource
import select
import signal
import socket
import sys
from typing import Any, NoReturn

REGISTRATION = "RAY_worker_register_timeout_seconds"
PATIENCE = 0.75  # share of the time that Ray gives a new worker, 60 s, for a server that still imports
FORKED, DECLINED = b"F", b"D"
SERVED = ("setup_worker.py", "--multiprocessing-fork", "vllm.model_executor.models.registry")
LENGTH = 8  # bytes of a message's length
MAX_FILES = 200  # open files in one message; the kernel takes 253
KEPT = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGTSTP, signal.SIGCONT}


def main(address: str, python: str) -> NoReturn:
    """Run ``python`` with this process's arguments.

    Args:
        address: the server's socket.
        python: the interpreter that this script stands for.
    """
    command = [python, *sys.argv[1:]]
    connection = _ask(address, command) if _may_fork(command) else None
    if connection is None:
        os.execv(python, command)
    _follow(*connection)


def _may_fork(command: list[str]) -> bool:
    """Whether it is worth asking; the server has the last word."""
    return any(part.endswith(SERVED) for part in (*command[1:3], command[-1]))


def _ask(address: str, command: list[str]) -> tuple[socket.socket, int] | None:
    """The connection to the server and the child's process id, or None where there will be no child."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    files = [number for number in open_files() if number != connection.fileno()]
    if len(files) > MAX_FILES:
        return None
    try:
        connection.settimeout(PATIENCE * float(os.environ.get(REGISTRATION) or 60))
        connection.connect(address)
        message = marshal.dumps({**describe(command), "files": files})
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        connection.sendmsg([len(message).to_bytes(LENGTH, "big")], [rights])
        connection.sendall(message)
        answer = connection.recv(1)
        if answer != FORKED:
            return None
        pid = int.from_bytes(connection.recv(LENGTH, socket.MSG_WAITALL), "big")
    except OSError:
        return None
    connection.settimeout(None)
    return connection, pid


def describe(command: list[str]) -> dict[str, Any]:
    """All that a child inherits in an exec, but the open files."""
    limits = {
        name: resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    }
    umask = os.umask(0)
    os.umask(umask)
    return {
        "command": command,
        "environment": dict(os.environb),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "session": os.getsid(0),
        "umask": umask,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": limits,
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": ignored(),
        "oom": _read("/proc/self/oom_score_adj"),
        "user": (os.getresuid(), os.getresgid()),
    }


def ignored() -> list[int]:
    """Numbers of the signals that this process ignores."""
    mask = int(_read("/proc/self/status").split("SigIgn:")[1].split()[0], 16)
    return [number for number in range(1, 65) if mask >> (number - 1) & 1]


def open_files() -> list[int]:
    """Numbers of this process's open files."""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the listing itself
        return False
    return True


def _follow(connection: socket.socket, pid: int) -> NoReturn:
    """Stand for the child until it ends: pass signals on to it, and end as it does."""
    own = connection.fileno()
    null = os.open(os.devnull, os.O_RDWR)
    for number in open_files():
        if number not in (own, null):
            os.dup2(null, number, inheritable=False)  # the child has them; a pipe's reader must see its end
    skipped = {*KEPT, *ignored()}
    for number in signal.valid_signals():
        if number not in skipped and number < signal.SIGRTMIN:
            try:
                signal.signal(number, lambda received, _: _pass_on(pid, received))
            except (OSError, ValueError):
                pass
    answer = connection.recv(LENGTH, socket.MSG_WAITALL)
    if len(answer) == LENGTH:
        _end(int.from_bytes(answer, "big", signed=True))
    try:  # the server died; the child lives on
        select.select([os.pidfd_open(pid)], [], [])
    except OSError:
        pass
    _end(1)


def _pass_on(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _end(code: int) -> NoReturn:
    """End with an exit code, or by a signal where the code is negative."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
