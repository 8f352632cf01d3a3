"""Write checkpoints while training goes on, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from flashpatch.patches.eagle.errors import eagle_error

logger = logging.getLogger("flashpatch.eagle")

_FAULTS = (Exception, CheckpointException)  # torch derives the second from BaseException
_DONE = re.compile(r"step-(\d+)")


class Checkpoints:
    """Keep a trainer's checkpoints in one folder; each gets its final name once it is complete.

    Args:
        folder: made if missing.
        keep: complete checkpoints to keep.

    Attributes:
        failed: checkpoints that could not be written, as when the disk is full; training goes on.
        problem: why the last one failed, or "".
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        self.failed, self.problem = 0, ""
        self._running: tuple[Future, Path, Path] | None = None
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, trainer: Any) -> None:
        """Start a checkpoint of a trainer's present state, after waiting for the one before."""
        self.settle()
        step = trainer.count
        part, final = self.folder / f".step-{step}", self.folder / f"step-{step}"
        shutil.rmtree(part, ignore_errors=True)
        try:
            saving = dcp.async_save(trainer.state(), checkpoint_id=part, no_dist=True)
            future = getattr(saving, "upload_completion", saving)
            self._running = future, part, final
        except _FAULTS as error:  # no room for the copy, or a folder that cannot be made
            self._fault(error, part)

    def settle(self) -> None:
        """Wait until the checkpoint being written is complete, or has failed."""
        if self._running is None:
            return
        future, part, final = self._running
        self._running = None
        try:
            future.result()
            shutil.rmtree(final, ignore_errors=True)
            os.replace(part, final)
            for old in self._complete()[: -self.keep]:
                shutil.rmtree(self.folder / f"step-{old}", ignore_errors=True)
            self.problem = ""
        except _FAULTS as error:  # torch wraps what went wrong in an error of its own
            self._fault(error, part)

    def newest(self) -> Path | None:
        """Return the last complete checkpoint; None if there is none."""
        steps = self._complete()
        return self.folder / f"step-{steps[-1]}" if steps else None

    def resume(self, trainer: Any) -> bool:
        """Restore a trainer from the last complete checkpoint; return False when there is none.

        Raises:
            PatchError: the checkpoint cannot be read or is of another trainer.
        """
        path = self.newest()
        if path is None:
            return False
        state = trainer.state()
        try:
            dcp.load(state, checkpoint_id=path, no_dist=True)
        except _FAULTS as error:
            raise eagle_error(
                "drafter checkpoint",
                f"cannot resume from {path}: {str(error).strip().splitlines()[-1]}",
                "Delete it, to resume from the one before or to start from scratch.",
            ) from error
        trainer.restore(state)
        return True

    def discard(self) -> None:
        """Delete the newest checkpoint, which is damaged."""
        path = self.newest()
        if path is not None:
            shutil.rmtree(path)

    def _complete(self) -> list[int]:
        found: list[int] = []
        with contextlib.suppress(FileNotFoundError):
            for entry in self.folder.iterdir():
                if (match := _DONE.fullmatch(entry.name)) and (entry / ".metadata").exists():
                    found.append(int(match[1]))
        return sorted(found)

    def _fault(self, error: BaseException, part: Path) -> None:
        self.failed += 1
        self.problem = f"{type(error).__name__}: {error}"
        logger.warning("a drafter checkpoint was not written: %s", self.problem)
        shutil.rmtree(part, ignore_errors=True)
