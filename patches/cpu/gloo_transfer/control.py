"""Connect the sender of a transfer with each receiver: what is due next, and why an end has failed.

A collective of gloo cannot be given up while a peer is missing. So it starts only when everybody has said to be ready,
and these connections say so. They notice a process that ends at once, since its kernel closes them.

Messages are JSON objects with a ``kind``. A receiver says ``hello`` with the transfer's token, ``ready`` for each bucket,
``received`` at the end; the sender ``welcome``, ``begin``, ``bucket``, ``end``; both say ``failed``.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.cpu.gloo_transfer.errors import silence, transfer_error

_HELLO = 4096  # most bytes of a first message
_LONGER = 1.5
"""By how much a receiver waits longer than the sender, who knows which other receiver is stuck."""
_TICK = 0.2  # seconds between two looks at whether this end was closed
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


def myself() -> str:
    """Name this process for errors at other places."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class Link:
    """One end of a connection; messages may be sent from several threads."""

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _KEEP_ALIVE:
            stream.setsockopt(socket.IPPROTO_TCP, option, seconds)
        self.address = stream.getsockname()[0]
        self.connection = Connection(stream.detach())
        self._lock = threading.Lock()

    def send(self, kind: str, **values: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone.
        """
        with self._lock:
            self.connection.send_bytes(json.dumps({"kind": kind, **values}).encode())

    def receive(self, most: int | None = None) -> dict[str, Any]:
        """Read one message, of at most so many bytes.

        Raises:
            EOFError, OSError: the other end is gone, or sent more.
        """
        return json.loads(self.connection.recv_bytes(most))

    def close(self) -> None:
        """Close this end."""
        with self._lock:
            self.connection.close()


class Sender:
    """The sender's end: a listening socket, and a link to each receiver.

    Args:
        host: address of this machine that receivers reach.
        timeout: seconds of silence after which a receiver counts as stuck.
    """

    def __init__(self, host: str, timeout: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=1024)
        self._timeout = timeout
        self._links: dict[int, Link] = {}
        self._peers: dict[int, str] = {}
        self._said: dict[int, dict[str, Any]] = {}
        self.token = secrets.token_hex(16)
        self.port: int = self._server.getsockname()[1]
        self.version = "the next version"

    def accept(self, ranks: Iterable[int], peers: dict[int, str]) -> None:
        """Wait until all receivers have connected with this transfer's token; others are sent away.

        Args:
            ranks: of the receivers.
            peers: what each receiver is, for errors.

        Raises:
            PatchError: names those that did not come.
        """
        self._peers = dict(peers)
        missing, deadline = set(ranks), time.monotonic() + self._timeout
        while missing:
            self._server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                stream, _ = self._server.accept()
            except TimeoutError:
                names = ", ".join(self.name(rank) for rank in sorted(missing))
                raise silence(names, "connect to the trainer", self.version, self._timeout) from None
            rank = self._greet(Link(stream), missing, deadline)
            missing.discard(rank)
        self.tell("welcome")

    def _greet(self, link: Link, missing: set[int], deadline: float) -> int:
        """Return the rank behind a new link, -1 for one that does not belong here."""
        try:
            if not link.connection.poll(max(min(deadline - time.monotonic(), 5.0), 0.0)):
                raise EOFError
            hello = link.receive(_HELLO)
            rank = hello.get("rank")
            if not hmac.compare_digest(str(hello.get("token")), self.token):
                link.send(
                    "failed", error="this transfer has another token: the process belongs to an earlier one"
                )
                raise EOFError
            if rank not in missing:
                link.send("failed", error=f"rank {rank} is not expected, or has connected already")
                raise EOFError
        except (EOFError, OSError, ValueError, TypeError, AttributeError):  # it said something else
            link.close()
            return -1
        self._links[rank] = link
        return rank

    def name(self, rank: int) -> str:
        """Name a receiver for errors."""
        return f"rollout rank {rank} ({self._peers.get(rank, 'unknown process')})"

    def tell(self, kind: str, **values: Any) -> None:
        """Send a message to all receivers.

        Raises:
            PatchError: one is gone.
        """
        for rank, link in self._links.items():
            try:
                link.send(kind, **values)
            except OSError:
                self.look(0.0)  # it may have said why
                raise self._ended(rank) from None

    def expect(self, kind: str, number: int) -> None:
        """Wait until the last message of every receiver is of this kind and number.

        Raises:
            PatchError: a receiver failed, ended or kept silent.
        """

        deadline = time.monotonic() + self._timeout
        while self._lacking(kind, number):
            left = deadline - time.monotonic()
            if left <= 0:
                raise self.late(kind, number)
            self.look(left)

    def late(self, kind: str, number: int) -> PatchError:
        """Return the error for the receivers that did not say this in time."""
        names = ", ".join(map(self.name, self._lacking(kind, number)))
        what = f"take bucket {number}" if kind == "ready" else "confirm what it received"
        return silence(names or "gloo", what, self.version, self._timeout)

    def _lacking(self, kind: str, number: int) -> list[int]:
        """Return the receivers whose last message is another."""
        last = {rank: (said["kind"], said["number"]) for rank, said in self._said.items()}
        return [rank for rank in self._links if last.get(rank) != (kind, number)]

    def look(self, seconds: float) -> None:
        """Read what receivers have said, waiting at most so long for the first.

        Raises:
            PatchError: a receiver failed or ended.
        """
        ends = {link.connection: rank for rank, link in self._links.items()}
        ended = []
        for connection in wait(list(ends), seconds):
            rank = ends[connection]
            try:
                message = self._links[rank].receive()
            except (EOFError, OSError):
                ended.append(rank)
                continue
            if message["kind"] == "failed":
                raise transfer_error(f"{self.name(rank)} failed at {self.version}:\n{message['error']}\n")
            self._said[rank] = message
        if ended:
            raise self._ended(ended[0])

    def _ended(self, rank: int) -> PatchError:
        return transfer_error(
            f"{self.name(rank)} ended during the transfer of {self.version}.",
            "Its log says why; it may have been killed. Leave its replica out, or end the job.",
        )

    def fail(self, text: str) -> None:
        """Say to all receivers that can be reached why the transfer ends."""
        for link in self._links.values():
            try:
                link.send("failed", error=text)
            except OSError:
                pass

    def close(self) -> None:
        """Close all connections."""
        self._server.close()
        for link in self._links.values():
            link.close()
        self._links.clear()


class Receiver:
    """A receiver's end.

    Args:
        host, port, token: as the sender's `prepare` returned them.
        rank: of this process in the transfer.
        timeout: seconds of silence after which the sender counts as stuck, times `_LONGER`.

    Raises:
        PatchError: the sender cannot be reached, or this is not its transfer.
    """

    def __init__(self, host: str, port: int, token: str, rank: int, timeout: float) -> None:
        self._timeout, self.rank = _LONGER * timeout, rank
        self.version = "the next version"
        self._stopped, self._reading = threading.Event(), threading.Lock()
        try:
            self._link = Link(socket.create_connection((host, port), timeout))
        except OSError as error:
            raise transfer_error(
                f"rollout rank {rank} ({myself()}) cannot reach the trainer at {host}:{port}: {error}.",
                "The trainer may have ended or given this transfer up; its log says so.",
            ) from error
        self.address = self._link.address
        self.say("hello", token=token, rank=rank)
        self.expect("welcome")

    def say(self, kind: str, **values: Any) -> None:
        """Send a message; a sender that is gone is noticed by `expect`."""
        try:
            self._link.send(kind, **values)
        except OSError:
            pass

    def expect(self, *kinds: str) -> dict[str, Any]:
        """Wait for a message of one of these kinds and return it.

        Raises:
            PatchError: the sender failed, ended, kept silent, or said something else; or this end was closed.
        """
        deadline = time.monotonic() + self._timeout
        while (message := self.look(_TICK)) is None:
            if time.monotonic() > deadline:
                raise self.late(f"send {' or '.join(kinds)}")
        if message["kind"] not in kinds:
            raise transfer_error(
                f"{message['kind']} came from the trainer where {' or '.join(kinds)} was due."
            )
        return message

    def late(self, what: str) -> PatchError:
        """Return the error for a sender that did not do something in time."""
        return silence(
            "the trainer's rank 0", f"{what} to rollout rank {self.rank}", self.version, self._timeout
        )

    def look(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message; None when there is none in this time.

        Raises:
            PatchError: the sender failed or ended, or this end was closed.
        """
        try:
            with self._reading:
                if self._stopped.is_set():
                    raise transfer_error(f"rollout rank {self.rank} gave up {self.version}.")
                if not self._link.connection.poll(seconds):
                    return None
                message = self._link.receive()
        except (EOFError, OSError):
            raise transfer_error(
                f"the trainer's rank 0 ended during the transfer of {self.version} to rollout rank {self.rank}.",
                "The trainer's log says why.",
            ) from None
        if message["kind"] == "failed":
            raise transfer_error(
                f"rollout rank {self.rank} does not get {self.version}: the sender failed:\n{message['error']}\n"
            )
        return message

    def fail(self, text: str) -> None:
        """Say to the sender why this process does not go on, once, and wake a thread that waits here."""
        if not self._stopped.is_set():
            self._stopped.set()
            self.say("failed", error=text)

    def close(self) -> None:
        """Close the connection, once no thread reads from it."""
        self._stopped.set()
        with self._reading:
            self._link.close()


Watch = Callable[[float], Any]
"""`Sender.look` or `Receiver.look`."""
