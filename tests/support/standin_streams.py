"""A stand-in for the module of an accelerator: streams that note who waits for whom, and which one a thread works on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        if other is not self:
            self.log.append(f"{self.name} waits for {other.name}")


class Accelerator:
    """Stands for ``torch.cuda`` while tensors are a CPU's; each thread begins on the stream ``default``.

    Attributes:
        log: what streams have waited for, and what a test adds."""

    def __init__(self, monkeypatch) -> None:
        self.log: list[str] = []
        self.default, self._here = Stream("default", self.log), threading.local()
        monkeypatch.setattr(torch, "get_device_module", lambda device=None: self)

    def Stream(self, name: str) -> Stream:
        return Stream(name, self.log)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self._here, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def note(self, what: str) -> None:
        """Add to the log what happens on the current stream."""
        self.log.append(f"{what} on {self.current_stream().name}")
