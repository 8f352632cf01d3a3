"""Train a drafter in slices of time, between commands.

Commands: ``{"command": "train", "seconds": s}``, ``{"command": "order"}``, both with the orders of
`coordinator.Coordinator.order`, ``{"command": "stop"}``, ``{"command": "exit"}``.

Events: ``ready``, ``training`` (once a second, with the last step's figures), ``drafter`` (new weights are in ``folder``),
``idle`` (after each command, which it names), ``error`` (a command failed; the worker goes on), ``bye``."""

from __future__ import annotations

import queue
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from flashpatch import ledger
from flashpatch.patches.eagle.capture.sample_queue import SampleReader
from flashpatch.patches.eagle.train.buffer import Buffer
from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.export import load_weights, own_embedding, save_drafter, written
from flashpatch.patches.eagle.train.pack import Pack, pack, windows
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings
from flashpatch.patches.eagle.train.trainer import Trainer

REPORT_SECONDS = 1.0  # between two events while training
POLL_SECONDS = 0.05  # between two looks for samples
KEEP = 3  # newest drafters that stay on disk


class Worker:
    """Train in slices, between commands.

    Args:
        settings: see `WorkerSettings`.
        report: called with every event.
        commands: queue of commands.

    Attributes:
        resumed: whether the trainer goes on from a drafter that an earlier one wrote."""

    def __init__(
        self,
        settings: WorkerSettings,
        report: Callable[[dict[str, Any]], None],
        commands: queue.Queue[dict[str, Any]],
    ) -> None:
        self.settings, self._report, self._commands = settings, report, commands
        self._target = settings.target  # folder of the policy's embedding and head
        self.device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.config = drafter_config(
            AutoConfig.from_pretrained(settings.target), settings.kind, settings.drafter
        )
        self._embedding: torch.Tensor | None = None  # the drafter's own
        if settings.drafter and settings.engine == "vllm":  # SGLang gives every drafter the target's
            first = TargetEmbeddings.load(settings.target)
            self._embedding = own_embedding(settings.drafter, settings.kind, first)
        self.reader = SampleReader(settings.queue)
        self.buffer = Buffer(settings.samples, settings.bytes, settings.versions, settings.seed)
        self.trainer = self._open_trainer()
        for left in Path(settings.folder).glob(
            ".drafter-*"
        ):  # by a trainer that was killed while it wrote one
            shutil.rmtree(left, ignore_errors=True)

    def _open_trainer(self) -> Trainer:
        """Return a trainer, from the newest drafter in its folder or else as the settings say. Raises PatchError if that is
        another target's, or damaged."""
        settings, drafter = self.settings, make_drafter(self.config, self.settings.seed)
        earlier = written(Path(settings.folder))
        self.resumed, newest = bool(earlier), max(earlier, default=0)
        if self.resumed or settings.drafter:
            load_weights(drafter, earlier.get(newest, settings.drafter))
        trainer = Trainer(drafter.to(self.device), self._load_target(settings.target), settings)
        trainer.count = self._begun = newest
        return trainer

    def run(self) -> None:
        """Execute commands until one is to exit."""
        where = {"resumed": self.resumed, "device": str(self.device)}
        self._report({"event": "ready", "step": self.trainer.count, **where})
        while True:
            command = self._commands.get()
            try:
                if command["command"] == "exit":
                    self._report({"event": "bye", "step": self.trainer.count})
                    return
                self._execute(command)
            except Exception as error:  # a full disk or a damaged file must not end the worker
                problem = f"{type(error).__name__}: {error}"
                self._report({"event": "error", "command": command.get("command"), "problem": problem})
            self._report({"event": "idle", "command": command.get("command"), **self._figures()})

    def _execute(self, command: dict[str, Any]) -> None:
        try:
            self._obey(command)
        finally:  # an order that cannot be obeyed is reported, and costs no slice
            if command["command"] == "train":
                self.train(float(command["seconds"]))

    def _obey(self, orders: Mapping[str, Any]) -> None:
        if orders.get("target", self._target) != self._target:
            self.trainer.target_embeddings = self._load_target(orders["target"])
            self._target = orders["target"]

    def train(self, seconds: float) -> None:
        """Train until the time is over, or another command arrives, and write the drafter if it has learned."""
        end, reported = time.monotonic() + seconds, 0.0
        found: dict[str, float] = {}
        while time.monotonic() < end and self._commands.empty():
            self._read_samples()
            rows = self._rows() if len(self.buffer) >= self.settings.least else []
            if rows:
                found = self.trainer.step(rows)
            else:
                time.sleep(POLL_SECONDS)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                self._report({"event": "training", **self._figures(), **found})
        if found:
            self._write(found)

    def _read_samples(self) -> None:
        for sample in self.reader.read_samples(sys.maxsize):  # all: old policies' come first
            self.buffer.add(sample)

    def _rows(self) -> list[Pack]:
        """Return rows of windows drawn from the buffer."""
        settings, found, total = self.settings, [], 0
        for sample in self.buffer.draw(max(1, settings.batch // 16)):
            for part in windows(sample, settings.window, settings.kind == "eagle3"):
                if total + len(part) <= settings.batch or not found:
                    found.append(part)
                    total += len(part)
            if total >= settings.batch:
                break
        return pack(found, settings.batch)

    def _write(self, found: Mapping[str, float]) -> None:
        path = save_drafter(
            Path(self.settings.folder) / f"drafter-{self.trainer.count}",
            self.trainer.weights(),
            self.config,
            self.settings.engine,
            self.trainer.target_embeddings,
            self.settings.drafter,
            getattr(torch, self.settings.dtype),
        )
        self._report({"event": "drafter", "folder": str(path), **self._figures(), **found})
        ledger.note(eagle_training={"drafter": str(path), **self._figures()})
        for _, old in sorted(written(path.parent).items())[:-KEEP]:
            if old not in (path, Path(self.settings.drafter)):  # engines read its names again
                shutil.rmtree(old, ignore_errors=True)

    def _figures(self) -> dict[str, Any]:
        return {
            **self.reader.counts,
            "step": self.trainer.count,
            "trained": self.trainer.count - self._begun,
            "skipped": self.trainer.skipped,
            "samples": len(self.buffer),
        }

    def _load_target(self, folder: str) -> TargetEmbeddings:
        found = TargetEmbeddings.load(folder)
        if self._embedding is not None:
            found = TargetEmbeddings(self._embedding, found.head)
        return found.to(self.device, torch.float32)
