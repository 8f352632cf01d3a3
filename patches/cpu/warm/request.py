"""Receive a launcher's request, and take its place in a forked child."""

from __future__ import annotations

import array
import fcntl
import marshal
import os
import resource
import signal
import socket
import sys
from collections.abc import Collection
from typing import Any

from flashpatch.patches.cpu.warm import launcher


class Request:
    """One launcher's request.

    Attributes:
        command: the command line, the interpreter first.
        facts: what `launcher.describe` found.
        received: the launcher's open files, under numbers of this process.
    """

    def __init__(self, facts: dict[str, Any], received: list[int]) -> None:
        self.command: list[str] = facts["command"]
        self.facts = facts
        self.received = received

    def close(self) -> None:
        """Close this process's copies of the launcher's files."""
        for number in self.received:
            os.close(number)


def receive(connection: socket.socket) -> Request:
    """Read one request.

    Raises:
        OSError: the launcher went away in the middle.
    """
    size = array.array("i").itemsize
    length, ancillary, _, _ = connection.recvmsg(
        launcher.LENGTH, socket.CMSG_SPACE(launcher.MAX_FILES * size)
    )
    received = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(data[: len(data) - len(data) % size])
    wanted = int.from_bytes(length, "big")
    message = connection.recv(wanted, socket.MSG_WAITALL) if len(length) == launcher.LENGTH else b""
    if not message or len(message) < wanted:
        for number in received:
            os.close(number)
        raise ConnectionError("the launcher went away")
    return Request(marshal.loads(message), list(received))


def can_take_over(request: Request, held: Collection[int]) -> bool:
    """Whether a fork of this process may become what the launcher is.

    Args:
        request: what the launcher sent.
        held: files that imports opened in this process; a launcher's file cannot take such a number.
    """
    facts = request.facts
    same_user = facts["user"] == (os.getresuid(), os.getresgid())
    complete = len(facts["files"]) == len(request.received) and not set(held).intersection(facts["files"])
    return same_user and complete and facts["session"] == os.getsid(0)


def take_over(request: Request) -> None:
    """Make this process what an exec by the launcher would have made."""
    facts = request.facts
    _files(facts["files"], request.received)
    os.chdir(facts["folder"])
    os.umask(facts["umask"])
    for name, limits in facts["limits"].items():
        if resource.getrlimit(getattr(resource, name)) != limits:
            resource.setrlimit(getattr(resource, name), limits)
    if os.getpriority(os.PRIO_PROCESS, 0) != facts["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, facts["nice"])
    if sorted(os.sched_getaffinity(0)) != facts["cores"]:
        os.sched_setaffinity(0, facts["cores"])
    with open("/proc/self/oom_score_adj", "r+") as file:
        if file.read().strip() != facts["oom"].strip():
            file.write(facts["oom"])
    if os.getpgid(0) != facts["group"]:
        os.setpgid(0, facts["group"])
    ignored = set(launcher.ignored())
    for number in ignored.symmetric_difference(facts["ignored"]):
        signal.signal(number, signal.SIG_DFL if number in ignored else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, facts["blocked"])


def _files(numbers: list[int], received: list[int]) -> None:
    """Give the received files the numbers they had in the launcher; 0 to 2 stay closed if they were."""
    above = max([2, *numbers, *received]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in received]
    sys.stdout.flush()
    sys.stderr.flush()
    for number in {0, 1, 2, *received}:
        os.close(number)
    for number, copy in zip(numbers, moved, strict=True):
        os.dup2(copy, number, inheritable=True)
        os.close(copy)
