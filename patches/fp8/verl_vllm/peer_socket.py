"""Detect a failed or dead peer in verl's weight transfer.

Both ends of verl's weight transfer block in ``recv`` without a time-out, and neither can report a failure. A
`PeerSocket` replaces the socket: it polls, watches connections, checks that the peer is still working, and
sends failures in-band as plain text behind `FAILURE`, where verl sends pickles or empty answers."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from flashpatch.errors import PatchError

FAILURE = b"flashpatch failure\n"
"""Prefix of a message with the error of its sender; no pickle and no answer of verl's begins so."""

_TICK = 0.1  # seconds between two checks of the peer; data is noticed at once
_GRACE = 2.0  # seconds in which a lost peer's last message, or the reason of its end, may still arrive
_LINGER = 2000  # milliseconds that a failure may take to leave after the socket was closed
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED


class PeerSocket:
    """Replace a REQ or REP socket of verl's transfer.

    Args:
        socket: the socket, bound or connected.
        patch: id of the patch that errors name.
        peer: what the other side is, for errors.
        timeout: seconds to wait for the peer; 0 for ever.
        check_peer: called while waiting; raises when no answer will come.

    Attributes:
        waited: seconds spent waiting for the peer.
        last: the last message sent was the last bucket.
        complete: the last bucket was answered.
        over: the peer has failed or is gone: nothing can be sent to it.
        announced: name of the shared memory that was offered, or None."""

    def __init__(
        self,
        socket: zmq.Socket,
        *,
        patch: str,
        peer: str,
        timeout: float,
        check_peer: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = socket
        self._patch, self._peer, self._timeout, self._check_peer = patch, peer, timeout, check_peer
        self._monitor = socket.get_monitor_socket(_EVENTS, f"inproc://flashpatch-{uuid.uuid4().hex}")
        self._connected = 0
        self._lost: float | None = None  # time.monotonic()
        self.waited = 0.0
        self.last = self.complete = self.over = False
        self.announced: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    # -- what verl calls -------------------------------------------------------------------------------

    def send_pyobj(self, message: Any, *args: Any, **kwargs: Any) -> Any:
        """Send as verl does, once there is a peer to send to."""
        if isinstance(message, dict):
            self.announced = message.get("name", self.announced)
            self.last = bool(message.get("is_last"))
        self._wait(zmq.POLLOUT)
        return self._socket.send_pyobj(message, *args, **kwargs)

    def send(self, data: bytes, *args: Any, **kwargs: Any) -> Any:
        self._wait(zmq.POLLOUT)
        return self._socket.send(data, *args, **kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> bytes:
        """Return the peer's next message. Raises PatchError if the peer reported a failure, is gone, or did not answer
        in time."""
        self._wait(zmq.POLLIN)
        data = self._socket.recv(*args, **kwargs)
        if data.startswith(FAILURE):
            self.over = True
            text = data[len(FAILURE) :].decode(errors="replace").rstrip()
            raise self._problem(
                f"{self._peer} failed:\n{text}\n", "Mend what its traceback says; nothing was committed."
            )
        self.complete = self.last
        return data

    def recv_pyobj(self, *args: Any, **kwargs: Any) -> Any:
        """Return the peer's next message, unpickled as verl does."""
        return pickle.loads(self.recv(*args, **kwargs))

    def close(self, linger: int | None = None) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger)

    # -- failures --------------------------------------------------------------------------------------

    def fail(self, text: str, timeout: float = 0.0) -> None:
        """Send a failure, if it is our turn; wait up to ``timeout`` seconds for the peer to connect."""
        if self.over or self._socket.closed:
            return
        self.over = True
        self._socket.setsockopt(zmq.LINGER, _LINGER)
        deadline = time.monotonic() + timeout
        while not self._socket.poll(_TICK * 1000 * bool(timeout), zmq.POLLOUT):
            self._notice()
            if self._lost is not None or time.monotonic() >= deadline:
                return
        self._socket.send(FAILURE + text.encode(errors="replace"), zmq.NOBLOCK)

    def _wait(self, flag: int) -> None:
        """Return as soon as the socket is ready; raise when it will not be."""
        began = time.monotonic()
        poller = zmq.Poller()
        poller.register(self._socket, flag)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while not self._socket.poll(0, flag):
                self._check(time.monotonic() - began)
                poller.poll(_TICK * 1000)
        finally:
            self.waited += time.monotonic() - began

    def _check(self, silence: float) -> None:
        self._notice()
        try:
            self._check_peer()
        except BaseException:
            self.over = True
            raise
        if self._lost is not None and time.monotonic() - self._lost > _GRACE:
            self.over = True
            raise self._problem(
                f"{self._peer} is gone: its connection ended in the middle of a weight transfer.",
                "Look for its end in the job's log: it may have been killed, for memory for example.",
            )
        if 0 < self._timeout < silence:
            raise self._problem(
                f"{self._peer} has not answered for {self._timeout:g} s in a weight transfer.",
                "It may hang; if it is only slow, raise the option transfer_timeout (seconds, 0 for ever).",
            )

    def _notice(self) -> None:
        """Read events of connections. One that was made before the monitor was attached is not among them."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._connected += -1 if event == zmq.EVENT_DISCONNECTED else 1
            self._lost = (
                time.monotonic() if event == zmq.EVENT_DISCONNECTED and self._connected <= 0 else None
            )

    def _problem(self, problem: str, advice: str) -> PatchError:
        return PatchError(problem, patch=self._patch, advice=advice)
