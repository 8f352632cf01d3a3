"""The process that trains: ``python -m flashpatch.patches.eagle.train.worker SETTINGS-JSON``.

It reads orders as JSON lines from standard input and says what happens as JSON lines on standard output;
anything that libraries print goes to standard error. When its input ends, the parent is gone and it leaves
too.

Orders: ``{"do": "train", "seconds": s}``, ``{"do": "stop"}``, ``{"do": "load", "folder": f}`` (go on from
these weights, as after a rollback), ``{"do": "target", "folder": f}`` (the policy moved: its embedding and
head), ``{"do": "exit"}``.

Events: ``ready``, ``training`` (a sign of life with the last step's figures), ``drafter`` (new weights are in
``folder``), ``idle`` (after each order, which it names), ``error`` (an order failed; the worker goes on), ``bye``.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoConfig

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.eagle.capture.sample_queue import Reader
from flashpatch.patches.eagle.train.buffer import Buffer
from flashpatch.patches.eagle.train.checkpoint import Checkpoints
from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.export import load_weights, save_drafter
from flashpatch.patches.eagle.train.pack import Pack, pack, windows
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.train.target_embeddings import Frozen
from flashpatch.patches.eagle.train.trainer import Recipe, Trainer

BEAT = 1.0  # seconds between signs of life
WAIT = 0.05  # seconds between looks for samples
KEEP = 3  # drafters that stay on disk: the engine's, the one before, and the newest


class Worker:
    """Trains in slices, between orders.

    Args:
        settings: see `WorkerSettings`.
        say: takes events.
        orders: where orders arrive.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        say: Callable[[dict[str, Any]], None],
        orders: queue.Queue[dict[str, Any]],
    ) -> None:
        self.settings, self._say, self._orders = settings, say, orders
        self.device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.config = drafter_config(
            AutoConfig.from_pretrained(settings.target), settings.kind, settings.auxiliary
        )
        self.checkpoints = Checkpoints(Path(settings.folder) / "checkpoints")
        self.trainer, self.resumed = self._resume()
        self.reader = Reader(settings.ring)
        self.buffer = Buffer(
            settings.samples, settings.bytes, settings.keep, settings.versions, settings.seed
        )
        self._unsuitable = 0

    def _resume(self) -> tuple[Trainer, bool]:
        """A trainer as of the last checkpoint that can be read, else as the settings say."""
        settings = self.settings
        recipe = Recipe(
            rate=settings.rate, clip=settings.clip, states=settings.states, tokens=settings.tokens
        )
        while True:
            drafter = make_drafter(self.config, settings.seed)
            if settings.drafter:
                load_weights(drafter, settings.drafter)
            trainer = Trainer(drafter.to(self.device), self._frozen(settings.target), recipe)
            try:
                return trainer, self.checkpoints.resume(trainer)
            except PatchError as error:  # it may have been read half into this trainer
                self._say({"event": "error", "order": "resume", "problem": str(error)})
                self.checkpoints.discard()

    def run(self) -> None:
        """Follow orders until told to exit."""
        self._say({"event": "ready", "step": self.trainer.count, "resumed": self.resumed})
        while True:
            order = self._orders.get()
            try:
                if order["do"] == "exit":
                    self.checkpoints.settle()
                    self._say({"event": "bye", "step": self.trainer.count})
                    return
                self._follow(order)
            except Exception as error:  # a full disk or a damaged file must not end the worker
                self._say(
                    {
                        "event": "error",
                        "order": order.get("do"),
                        "problem": f"{type(error).__name__}: {error}",
                    }
                )
            self._say({"event": "idle", "order": order.get("do"), **self._figures()})

    def _follow(self, order: dict[str, Any]) -> None:
        if order["do"] == "train":
            self._train(float(order["seconds"]))
        elif order["do"] == "load":
            fresh = make_drafter(self.config)
            load_weights(fresh, order["folder"])
            self.trainer.load(fresh.state_dict())
            self.checkpoints.save(self.trainer)  # a restart must not bring back what was rolled back
        elif order["do"] == "target":
            self.trainer.frozen = self._frozen(order["folder"])

    def _train(self, seconds: float) -> None:
        """Train until the time is over or another order comes; write what was learned."""
        end, beat, began = time.monotonic() + seconds, 0.0, self.trainer.count
        found: dict[str, float] = {}
        while time.monotonic() < end and self._orders.empty():
            self._gather()
            rows = self._rows() if len(self.buffer) >= self.settings.least else []
            if rows:
                found = self.trainer.step(rows)
                every = self.settings.checkpoint
                if every and self.trainer.count % every == 0:
                    self.checkpoints.save(self.trainer)
            else:
                time.sleep(WAIT)
            if time.monotonic() - beat > BEAT:
                beat = time.monotonic()
                self._say({"event": "training", **self._figures(), **found})
        if self.trainer.count > began:
            self._write(found)

    def _gather(self) -> None:
        for sample in self.reader.take(16):
            fits = sample.hidden.shape[1] == self.config.hidden_size and int(sample.input_ids.max()) < (
                self.config.vocab_size
            )
            if self.settings.kind == "eagle3":
                fits = (
                    fits
                    and sample.auxiliary is not None
                    and sample.auxiliary.shape[1] == self.trainer.drafter.width
                )
            if fits:
                self.buffer.add(sample)
            else:
                self._unsuitable += 1

    def _rows(self) -> list[Pack]:
        """One row of windows drawn from the buffer."""
        settings, found, total = self.settings, [], 0
        for sample in self.buffer.draw(max(1, settings.batch // 16)):
            for part in windows(sample, settings.window, settings.kind == "eagle3", settings.prompts):
                if total + len(part) <= settings.batch or not found:
                    found.append(part)
                    total += len(part)
            if total >= settings.batch:
                break
        return pack(found, settings.batch)

    def _write(self, found: dict[str, float]) -> None:
        folder = Path(self.settings.folder)
        dtype = getattr(torch, self.settings.dtype)
        weights = {name: tensor.to(dtype) for name, tensor in self.trainer.weights().items()}
        path = save_drafter(
            folder / f"drafter-{self.trainer.count}",
            weights,
            self.config,
            self.settings.engine,
            self.trainer.frozen,
            self.settings.target,
        )
        self._say({"event": "drafter", "folder": str(path), **self._figures(), **found})
        ledger.note(eagle_training={"drafter": str(path), **self._figures()})
        old = sorted(folder.glob("drafter-*"), key=lambda one: int(one.name.partition("-")[2]))
        for one in old[:-KEEP]:
            shutil.rmtree(one, ignore_errors=True)

    def _figures(self) -> dict[str, Any]:
        reader, checkpoints = self.reader.counts, self.checkpoints
        return {
            "step": self.trainer.count,
            "skipped": self.trainer.skipped,
            "samples": len(self.buffer),
            "taken": reader["taken"],
            "corrupt": reader["corrupt"],
            "unsuitable": self._unsuitable,
            "checkpoints_failed": checkpoints.failed,
            "checkpoint_problem": checkpoints.problem,
        }

    def _frozen(self, folder: str) -> Frozen:
        return Frozen.load(folder).to(self.device, torch.float32)


def _listen(stream: TextIO, orders: queue.Queue[dict[str, Any]]) -> None:
    for line in stream:
        with contextlib.suppress(ValueError):
            order = json.loads(line)
            if isinstance(order, dict) and "do" in order:
                orders.put(order)
    orders.put({"do": "exit"})


def main() -> int:
    """Run a worker on standard input and output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the parent is gone; the end of the input says so too
            out.write(json.dumps(event, default=str) + "\n")

    try:
        settings = WorkerSettings.parse(sys.argv[1])
        with contextlib.suppress(OSError):
            os.nice(settings.niceness)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        orders: queue.Queue[dict[str, Any]] = queue.Queue()
        worker = Worker(settings, say, orders)
    except (PatchError, OSError, ValueError, IndexError) as error:
        say({"event": "refused", "problem": str(error)})
        return 2
    threading.Thread(target=_listen, args=(sys.stdin, orders), name="orders", daemon=True).start()
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
