"""Describe verl's weight syncs in this process, at whichever end of them it is: each call, and what is known between calls."""

from __future__ import annotations

import hashlib
import os
import traceback
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flashpatch.ledger import files
from flashpatch.patches._shared.context import holding, timed
from flashpatch.patches.fp8.verl.transfer.receipts import WorkerVersions

TICKET = "flashpatch"
"""The keyword argument that carries `Sending.ticket` to the rollout workers."""


@dataclass
class Sending:
    """One call of verl's ``ServerAdapter.update_weights``.

    Attributes:
        step: verl's ``global_steps``, None if it gives none.
        ticketed: whether the call that makes the workers receive carries `ticket`.
        id: identifies this call; workers return it in their receipts.
        adapter: whether a LoRA adapter travels, and no weights.
        future: of the call that makes the workers receive; None on ranks that do not make it.
        call: an awaitable of the workers' receipts; None if they give none.
        committed: SGLang's answer to the end of the session, or to the adapter; None until then.
        began: time.perf_counter() when SGLang's session was open.
        export: seconds in which the training engine prepared, before the sync.
        gather: seconds in the generator of weights.
        waited: seconds waiting for the worker.
        send: seconds in the transfer, both included.
        bytes, tensors: what was sent."""

    step: int | None = None
    ticketed: bool = True
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    adapter: bool = False
    future: Any = None
    call: Any = None
    committed: dict[str, Any] | None = None
    began: float = 0.0
    export: float = 0.0
    gather: float = 0.0
    waited: float = 0.0
    send: float = 0.0
    bytes: int = 0
    tensors: int = 0

    def ticket(self) -> dict[str, Any]:
        """Return plain values for the workers: which sync it is, and which process sends."""
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
        """Return the same weights, as lazily, and count and time them."""
        return self._async(weights) if relayed(weights) else self._plain(weights)

    def _plain(self, weights: Any) -> Iterator[Any]:
        weights = iter(weights)
        while True:
            with timed(self, "gather"):
                item = next(weights, None)
            if item is None:
                return
            self._count(item)
            yield item

    async def _async(self, weights: Any) -> AsyncIterator[Any]:
        weights = aiter(weights)
        while True:
            with timed(self, "gather"):
                item = await anext(weights, None)
            if item is None:
                return
            self._count(item)
            yield item

    def _count(self, item: tuple[str, Any]) -> None:
        self.tensors += 1
        self.bytes += item[1].nbytes


@dataclass
class Receiving:
    """One call of verl's ``vLLMColocateWorkerExtension.update_weights_from_ipc``.

    Attributes:
        ticket: of the sender, empty if it sent none.
        receive: seconds in ``receive_weights``; load: of them, in the engine's loading.
        bytes, tensors: what was received."""

    ticket: dict[str, Any] = field(default_factory=dict)
    receive: float = 0.0
    load: float = 0.0
    bytes: int = 0
    tensors: int = 0

    def sender_gone(self) -> bool:
        """Whether the sending process is known to have ended; False for one on another host."""
        pid, start = self.ticket.get("pid"), self.ticket.get("start")
        if not start or self.ticket.get("host") != files.host():
            return False
        return files.process_start(pid) != start


class WeightSync:
    """State of weight syncs in one process. A forked child starts with an empty one.

    Attributes:
        export_seconds: the training engine's preparation of weights since the last sync began.
        failed: whether this rollout worker's last update failed, so that its version was never committed.
        worker_versions: in the driver: version that each worker holds.
        metrics: in the driver: numbers of the last sync, until they are logged."""

    def __init__(self) -> None:
        self._sending: ContextVar[Sending | None] = ContextVar("sending", default=None)
        self._receiving: ContextVar[Receiving | None] = ContextVar("receiving", default=None)
        self.reset()

    def reset(self) -> None:
        """Forget everything; for tests and forked children."""
        self._sending.set(None)
        self._receiving.set(None)
        self._receipts: list[dict[str, Any]] = []
        self.export_seconds = 0.0
        self.failed = False
        self.worker_versions = WorkerVersions()
        self.metrics: dict[str, float] = {}

    @property
    def sending(self) -> Sending | None:
        """The call of ``ServerAdapter.update_weights`` that this context is in."""
        return self._sending.get()

    @property
    def receiving(self) -> Receiving | None:
        """The call of ``update_weights_from_ipc`` that this context is in."""
        return self._receiving.get()

    def begin(self, step: int | None) -> Sending:
        """Start a sync, including preceding export time."""
        sending, self.export_seconds = Sending(step, export=self.export_seconds), 0.0
        return sending

    def in_sending(self, sending: Sending) -> AbstractContextManager[None]:
        """Make ``sending`` the current call of this context."""
        return holding(self._sending, sending)

    def in_receiving(self, receiving: Receiving) -> AbstractContextManager[None]:
        """Make ``receiving`` the current call of this context."""
        return holding(self._receiving, receiving)

    def keep_receipt(self, receipt: dict[str, Any]) -> None:
        """Keep the receipt of a finished sync until the driver collects it."""
        self._receipts.append(receipt)

    def take_receipts(self) -> list[dict[str, Any]]:
        """Return and forget the receipts of the syncs since the last call."""
        receipts, self._receipts = self._receipts, []
        return receipts

    def take_metrics(self) -> dict[str, float]:
        """Return and forget the numbers of the last sync."""
        metrics, self.metrics = self.metrics, {}
        return metrics


WEIGHT_SYNC = WeightSync()
os.register_at_fork(after_in_child=WEIGHT_SYNC.reset)


def relayed(weights: Any) -> bool:
    """Whether weights come from a trainer in another process, through one of verl's checkpoint engines.

    These receive asynchronously; the generator of a training engine is a plain one."""
    return hasattr(weights, "__aiter__")


def job_socket_name(handle: str, run: str) -> str:
    """Return a socket name, from verl's and the id of this job's run, that no other job on this host uses. verl names
    it after Ray's job id and the ranks: of two jobs that each start a Ray of their own, the rollout of one would take
    the weights of the other."""
    mark = hashlib.blake2b(run.encode(), digest_size=6).hexdigest()
    stem, dot, _ = handle.rpartition(".sock")
    return f"{stem or handle}-{mark}{dot}"


def traceback_text(error: BaseException) -> str:
    """Format an exception with its traceback, causes and notes."""
    return "".join(traceback.format_exception(error)).rstrip()
