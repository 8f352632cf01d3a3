"""What one weight sync knows about itself, in the process that sends and in the one that receives."""

from __future__ import annotations

import hashlib
import os
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flashpatch.ledger import files

KEY = "flashpatch"
"""The keyword under which `ticket` travels to the rollout workers."""


@dataclass
class Sending:
    """One call of verl's ``ServerAdapter.update_weights``.

    Attributes:
        step: verl's ``global_steps``, None where it gives none.
        ticketed: whether the call that makes the workers receive carries `ticket`.
        id: names this call to the workers, which send it back.
        future: of the call that makes the workers receive; None on ranks that do not make it.
        call: the same as what can be awaited for the workers' receipts; None where they give none.
        export: seconds in which the training engine prepared, before the sync.
        gather: seconds in the generator of weights.
        waited: seconds waiting for the worker.
        send: seconds in the transfer, both included.
        bytes, tensors: what was sent.
    """

    step: int | None = None
    ticketed: bool = True
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    future: Any = None
    call: Any = None
    export: float = 0.0
    gather: float = 0.0
    waited: float = 0.0
    send: float = 0.0
    bytes: int = 0
    tensors: int = 0

    def ticket(self) -> dict[str, Any]:
        """Plain values for the workers: which sync it is, and which process sends."""
        pid = os.getpid()
        return {
            "id": self.id,
            "step": self.step,
            "run": files.run_id(),
            "host": files.host(),
            "pid": pid,
            "start": files.process_start(pid) or "",
        }

    def timed(self, weights: Any) -> Any:
        """The same weights, as lazily, counted."""
        return self._async(weights) if hasattr(weights, "__aiter__") else self._plain(weights)

    def _plain(self, weights: Any) -> Iterator[Any]:
        weights = iter(weights)
        while True:
            with self._gathering():
                item = next(weights, None)
            if item is None:
                return
            self._count(item)
            yield item

    async def _async(self, weights: Any) -> AsyncIterator[Any]:
        weights = aiter(weights)
        while True:
            with self._gathering():
                item = await anext(weights, None)
            if item is None:
                return
            self._count(item)
            yield item

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.gather += time.perf_counter() - began

    def _count(self, item: tuple[str, Any]) -> None:
        self.tensors += 1
        self.bytes += item[1].nbytes


@dataclass
class Receiving:
    """One call of verl's ``vLLMColocateWorkerExtension.update_weights_from_ipc``.

    Attributes:
        ticket: of the sender, empty where it gave none.
        receive: seconds in ``receive_weights``; load: of them, in the engine's loading.
        bytes, tensors: what came.
    """

    ticket: dict[str, Any] = field(default_factory=dict)
    receive: float = 0.0
    load: float = 0.0
    bytes: int = 0
    tensors: int = 0

    def sender_gone(self) -> bool:
        """Whether the sending process is known to have ended. It may live where this host cannot see it."""
        pid, start = self.ticket.get("pid"), self.ticket.get("start")
        if not start or self.ticket.get("host") != files.host():
            return False
        return files.process_start(pid) != start


exported = 0.0
"""Seconds that this process's training engine spent preparing weights since the last sync began."""


def private(handle: str, run: str) -> str:
    """The name of a socket that no other job on this host uses.

    verl names it after Ray's job id and the ranks. Two jobs that each start a Ray of their own have the same, and
    one's rollout takes the other's weights.
    """
    mark = hashlib.blake2b(run.encode(), digest_size=6).hexdigest()
    stem, dot, _ = handle.rpartition(".sock")
    return f"{stem or handle}-{mark}{dot}"


SENDING: ContextVar[Sending | None] = ContextVar("sending", default=None)
RECEIVING: ContextVar[Receiving | None] = ContextVar("receiving", default=None)


def begin(step: int | None) -> Sending:
    """A sync begins, to which the preparation of its weights belongs."""
    global exported
    sending, exported = Sending(step, export=exported), 0.0
    return sending


def trace(error: BaseException) -> str:
    """An exception with its traceback, causes and notes, as text."""
    return "".join(traceback.format_exception(error)).rstrip()
