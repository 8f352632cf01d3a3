"""Keep the answers of an engine in a file, for the engine that is opened in its place, as by a job that is resumed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from flashpatch import user_directories
from flashpatch.ledger.files import make_private
from flashpatch.patches._shared.atomic_file import replacing

logger = logging.getLogger("flashpatch.eagle")


class HistoryFile:
    """Append each answer as it ends; of an engine that is killed, those that were running are lost.

    The file is a row of int32: for each answer the length of its prompt, that of both, and the tokens of both.

    Args:
        folder: made if missing, readable by its owner only.
        vocabulary: size of the model's: another model's tokens may not be drafted.
        rank: of the engine among data-parallel ones; verl's number of the replica comes before it."""

    def __init__(self, folder: str, vocabulary: int, rank: int = 0) -> None:
        replica = os.environ.get("VERL_REPLICA_RANK", "0")
        self.path = Path(user_directories.expand(folder)) / f"{vocabulary}-{replica}-{rank}.tokens"
        self._failed = False

    def load(self, capacity: int) -> list[tuple[list[int], list[int]]]:
        """Return prompts and answers, the newest of at most ``capacity`` tokens, oldest first, and drop others from the
        file; nothing if it cannot be read or written. Never raises."""
        import numpy

        try:
            make_private(str(self.path.parent))
            numbers = numpy.fromfile(self.path, "<i4") if self.path.exists() else numpy.empty(0, "<i4")
            starts, end = [], 0
            while end + 2 <= len(numbers) and 0 <= numbers[end] <= numbers[end + 1] <= len(numbers) - end - 2:
                starts.append(end)
                end += 2 + int(numbers[end + 1])
            starts = [start for start in starts if end - start <= capacity]
            with replacing(self.path) as temporary:
                numbers[min(starts, default=end) : end].tofile(temporary)
        except OSError as error:
            self._fault(error)
            return []
        texts = [(numbers[start], numbers[start + 2 :][: numbers[start + 1]].tolist()) for start in starts]
        return [(text[:prompt], text[prompt:]) for prompt, text in texts]

    def append(self, prompt: int, tokens: list[int]) -> None:
        """Append an answer: all its tokens, the first ``prompt`` of which were asked. Never raises."""
        import numpy

        try:
            if len(tokens) > prompt and not self._failed:
                with self.path.open("ab") as file:
                    file.write(numpy.array([prompt, len(tokens), *tokens], "<i4").tobytes())
        except OSError as error:
            self._fault(error)

    def _fault(self, error: OSError) -> None:
        self._failed = True
        logger.warning("answers are not kept in %s: %s", self.path, error)
