"""Keep the files of a trainer's samples, so that one started again goes on with them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from flashpatch.errors import PatchError
from flashpatch.ledger.files import make_private
from flashpatch.patches.eagle.capture.sample import Sample
from flashpatch.patches.eagle.capture.sample_queue import SampleReader

logger = logging.getLogger("flashpatch.eagle")


FOLDER = "samples"
"""Name of the folder beside a trainer's checkpoints."""


class KeptSamples(SampleReader):
    """Read samples from a job's queue, and hold their files.

    Args:
        queue: directory of the job's queue.
        folder: beside the trainer's checkpoints.

    Attributes:
        counts: ``unkept`` too: files that could not be moved here, as when the disk is full; their samples are held in
            memory alone."""

    def __init__(self, queue: str | os.PathLike[str], folder: Path) -> None:
        super().__init__(queue)
        self.folder = folder

    def keep(self, file: Path, name: str) -> Path | None:
        """Move a sample's file here; return where it is, or None if that failed. Never raises."""
        target = self.folder / name
        try:
            make_private(str(self.folder))
            shutil.move(file, target)
            target.chmod(0o600)
        except OSError as error:
            if not self.counts["unkept"]:
                logger.warning("samples do not survive a restart of the trainer: %s", error)
            self.counts["unkept"] += 1
            with contextlib.suppress(OSError):
                target.unlink(missing_ok=True)  # part of a copy
            return None
        return target

    def read_kept(self) -> list[Sample]:
        """Return what an earlier trainer kept, and what is in the queue, oldest first; delete files that cannot be read.

        Each job counts its policies from 0, and these samples may be of several: all get version 0, not above any that comes."""
        found = []
        for file in sorted(self.folder.glob("*.safetensors")):  # names begin with the time of capture
            try:
                found.append(replace(Sample.load(file), file=file))
            except PatchError as error:
                logger.warning("%s", error)
                with contextlib.suppress(OSError):
                    file.unlink()
        return [replace(sample, version=0) for sample in found + self.read_samples(sys.maxsize)]
