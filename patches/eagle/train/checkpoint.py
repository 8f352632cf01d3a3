"""Write checkpoints while training goes on."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import torch

from flashpatch.ledger.files import make_private
from flashpatch.patches._shared.atomic_file import replacing
from flashpatch.patches.eagle.errors import eagle_error

logger = logging.getLogger("flashpatch.eagle")


class Checkpoints:
    """Keep a trainer's checkpoints in one folder; each gets its final name once it is complete.

    Args:
        folder: made if missing.
        keep: complete checkpoints to keep.

    Attributes:
        failed: checkpoints that could not be written, as when the disk is full; training goes on.
        problem: why the last one failed, or ""."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        self.failed, self.problem = 0, ""
        self._writing = threading.Thread()
        make_private(str(self.folder))

    def save(self, trainer: Any) -> None:
        """Start to write a copy of a trainer's present state, after waiting for the one before."""
        self.settle()
        copy = io.BytesIO()
        try:
            torch.save(trainer.state(), copy)
        except Exception as error:  # no room for it
            self._fault(error)
            return
        self._writing = threading.Thread(target=self._write, args=(copy, trainer.count), name="checkpoint")
        self._writing.start()

    def settle(self) -> None:
        """Wait until the checkpoint being written is complete, or has failed."""
        if self._writing.ident is not None:
            self._writing.join()

    def newest(self) -> Path | None:
        """Return the last complete checkpoint; None if there is none."""
        return next(reversed(self._complete()), None)

    def resume(self, trainer: Any) -> bool:
        """Restore a trainer from the last complete checkpoint; return False when there is none.

        Raises:
            PatchError: the checkpoint is damaged or is of another trainer.
            RuntimeError: it cannot be read now, as when its disk does not answer; starting again may help."""
        path = self.newest()
        if path is None:
            return False
        try:
            trainer.restore(torch.load(path, map_location="cpu", weights_only=True))
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            raise RuntimeError(f"{path} cannot be read now: {error}") from error
        except Exception as error:
            raise eagle_error(
                "drafter checkpoint",
                f"cannot resume from {path}: {' '.join(str(error).split())[:300]}",
                "Delete it, to resume from the one before or to start from scratch.",
            ) from error
        return True

    def discard(self) -> bool:
        """Delete the newest checkpoint if it is cut short or no checkpoint at all; return whether it was."""
        path = self.newest()
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            if archive.testzip() is None:
                return False
        path.unlink()
        return True

    def _write(self, copy: io.BytesIO, step: int) -> None:
        try:
            with replacing(self.folder / f"step-{step}.pt", self.folder / ".partial") as partial:
                partial.write_bytes(copy.getbuffer())
            for old in self._complete()[: -self.keep]:
                old.unlink()
            self.problem = ""
        except OSError as error:
            self._fault(error)

    def _complete(self) -> list[Path]:
        steps = {file: file.stem.removeprefix("step-") for file in self.folder.glob("step-*.pt")}
        return sorted((file for file in steps if steps[file].isdecimal()), key=lambda file: int(steps[file]))

    def _fault(self, error: Exception) -> None:
        self.failed += 1
        self.problem = f"{type(error).__name__}: {error}"
        logger.warning("a drafter checkpoint was not written: %s", self.problem)
