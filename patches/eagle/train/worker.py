"""Train in a process of its own: ``python -m flashpatch.patches.eagle.train.worker SETTINGS-JSON``.

It reads commands as JSON lines from standard input and reports events as JSON lines on standard output;
anything that libraries print goes to standard error. When its input ends, the parent has ended, and so does
it.

Commands: ``{"command": "train", "seconds": s}``, ``{"command": "stop"}``, ``{"command": "load", "folder":
f}`` (continue from these weights, as after a rollback), ``{"command": "target", "folder": f}`` (the policy's
new embedding and head), ``{"command": "exit"}``.

Events: ``ready``, ``training`` (once a second, with the last step's figures), ``drafter`` (new weights are in
``folder``), ``idle`` (after each command, which it names), ``error`` (a command failed; the worker goes on),
``bye``.
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
from flashpatch.patches.eagle.capture.sample_queue import SampleReader
from flashpatch.patches.eagle.train.buffer import Buffer
from flashpatch.patches.eagle.train.checkpoint import Checkpoints
from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.export import load_weights, save_drafter
from flashpatch.patches.eagle.train.pack import Pack, pack, windows
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings
from flashpatch.patches.eagle.train.trainer import Recipe, Trainer

REPORT_SECONDS = 1.0  # between two events while training
POLL_SECONDS = 0.05  # between two looks for samples
KEEP = 3  # drafters that stay on disk: the engine's, the one before, and the newest


class Worker:
    """Train in slices, between commands.

    Args:
        settings: see `WorkerSettings`.
        report: called with every event.
        commands: queue of commands.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        report: Callable[[dict[str, Any]], None],
        commands: queue.Queue[dict[str, Any]],
    ) -> None:
        self.settings, self._report, self._commands = settings, report, commands
        self.device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.config = drafter_config(
            AutoConfig.from_pretrained(settings.target), settings.kind, settings.auxiliary
        )
        self.checkpoints = Checkpoints(Path(settings.folder) / "checkpoints")
        self.trainer, self.resumed = self._resume()
        self.reader = SampleReader(settings.ring)
        self.buffer = Buffer(
            settings.samples, settings.bytes, settings.keep, settings.versions, settings.seed
        )
        self._unsuitable = 0

    def _resume(self) -> tuple[Trainer, bool]:
        """Return a trainer, from the last checkpoint that can be read or else as the settings say."""
        settings = self.settings
        names = ("rate", "clip", "states", "tokens", "ttt_steps", "ttt_decay")
        recipe = Recipe(**{name: getattr(settings, name) for name in names})
        while True:
            drafter = make_drafter(self.config, settings.seed)
            if settings.drafter:
                load_weights(drafter, settings.drafter)
            trainer = Trainer(drafter.to(self.device), self._load_target(settings.target), recipe)
            try:
                return trainer, self.checkpoints.resume(trainer)
            except PatchError as error:  # parts of it may be in this trainer
                self._report({"event": "error", "command": "resume", "problem": str(error)})
                self.checkpoints.discard()

    def run(self) -> None:
        """Execute commands until one is to exit."""
        self._report({"event": "ready", "step": self.trainer.count, "resumed": self.resumed})
        while True:
            command = self._commands.get()
            try:
                if command["command"] == "exit":
                    self.checkpoints.settle()
                    self._report({"event": "bye", "step": self.trainer.count})
                    return
                self._execute(command)
            except Exception as error:  # a full disk or a damaged file must not end the worker
                self._report(
                    {
                        "event": "error",
                        "command": command.get("command"),
                        "problem": f"{type(error).__name__}: {error}",
                    }
                )
            self._report({"event": "idle", "command": command.get("command"), **self._figures()})

    def _execute(self, command: dict[str, Any]) -> None:
        if command["command"] == "train":
            self._train(float(command["seconds"]))
        elif command["command"] == "load":
            fresh = make_drafter(self.config)
            load_weights(fresh, command["folder"])
            self.trainer.load(fresh.state_dict())
            self.checkpoints.save(self.trainer)  # a restart must not bring back what was rolled back
        elif command["command"] == "target":
            self.trainer.target_embeddings = self._load_target(command["folder"])

    def _train(self, seconds: float) -> None:
        """Train until the time is over or another command arrives; then write a drafter."""
        end, reported, began = time.monotonic() + seconds, 0.0, self.trainer.count
        found: dict[str, float] = {}
        while time.monotonic() < end and self._commands.empty():
            self._read_samples()
            rows = self._rows() if len(self.buffer) >= self.settings.least else []
            if rows:
                found = self.trainer.step(rows)
                every = self.settings.checkpoint
                if every and self.trainer.count % every == 0:
                    self.checkpoints.save(self.trainer)
            else:
                time.sleep(POLL_SECONDS)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                self._report({"event": "training", **self._figures(), **found})
        if self.trainer.count > began:
            self._write(found)

    def _read_samples(self) -> None:
        for sample in self.reader.read_samples(16):
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
        """Return rows of windows drawn from the buffer."""
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
            self.trainer.target_embeddings,
            self.settings.target,
        )
        self._report({"event": "drafter", "folder": str(path), **self._figures(), **found})
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
            "read": reader["read"],
            "corrupt": reader["corrupt"],
            "unsuitable": self._unsuitable,
            "checkpoints_failed": checkpoints.failed,
            "checkpoint_problem": checkpoints.problem,
        }

    def _load_target(self, folder: str) -> TargetEmbeddings:
        return TargetEmbeddings.load(folder).to(self.device, torch.float32)


def _read_commands(stream: TextIO, commands: queue.Queue[dict[str, Any]]) -> None:
    for line in stream:
        with contextlib.suppress(ValueError):
            command = json.loads(line)
            if isinstance(command, dict) and "command" in command:
                commands.put(command)
    commands.put({"command": "exit"})


def main() -> int:
    """Run a worker on standard input and output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(event: dict[str, Any]) -> None:
        with contextlib.suppress(
            OSError, ValueError
        ):  # the parent has ended, which the end of the input shows too
            out.write(json.dumps(event, default=str) + "\n")

    try:
        settings = WorkerSettings.parse(sys.argv[1])
        with contextlib.suppress(OSError):
            os.nice(settings.niceness)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        commands: queue.Queue[dict[str, Any]] = queue.Queue()
        worker = Worker(settings, report, commands)
    except (PatchError, OSError, ValueError, IndexError) as error:
        report({"event": "refused", "problem": str(error)})
        return 2
    threading.Thread(target=_read_commands, args=(sys.stdin, commands), name="commands", daemon=True).start()
    worker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
