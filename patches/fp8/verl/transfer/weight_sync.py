"""Hold the state of verl's weight syncs in this process, at whichever end of them it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from flashpatch.patches.fp8.verl.transfer.receipts import WorkerVersions
from flashpatch.patches.fp8.verl.transfer.sync_calls import Receiving, Sending


class WeightSync:
    """State of weight syncs in one process. A forked child starts with an empty one.

    Attributes:
        export_seconds: the training engine's preparation of weights since the last sync began.
        failed: whether this rollout worker's last update failed, so that its version was never committed.
        worker_versions: in the driver: version that each worker holds.
        metrics: in the driver: numbers of the last sync, until they are logged.
    """

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

    @contextmanager
    def in_sending(self, sending: Sending) -> Iterator[None]:
        """Make ``sending`` the current call of this context."""
        token = self._sending.set(sending)
        try:
            yield
        finally:
            self._sending.reset(token)

    @contextmanager
    def in_receiving(self, receiving: Receiving) -> Iterator[None]:
        """Make ``receiving`` the current call of this context."""
        token = self._receiving.set(receiving)
        try:
            yield
        finally:
            self._receiving.reset(token)

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
