"""Keep the answers of an engine in a file, for the engine that is opened in its place, as by a job that is resumed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from flashpatch import user_directories
from flashpatch.ledger.files import make_private

logger = logging.getLogger("flashpatch.eagle")

_BYTES = 12  # of a token in the file, at most


class HistoryFile:
    """Append each answer as it ends; of an engine that is killed, those that were running are lost.

    A line holds an answer as JSON: the length of its prompt, and the tokens of both. Once a file holds ``capacity`` tokens another is
    begun, and the one before the last goes.

    Args:
        folder: made if missing; others may not write to it.
        capacity: tokens that are remembered.
        vocabulary: size of the model's; other models have files of their own.
        rank: of the engine among data-parallel ones; verl's number of the replica comes before it."""

    def __init__(self, folder: str, capacity: int, vocabulary: int, rank: int = 0) -> None:
        self.folder, self.capacity, self.vocabulary = user_directories.expand(folder), capacity, vocabulary
        name = f"{vocabulary}-{os.environ.get('VERL_REPLICA_RANK', '0')}-{rank}.jsonl"
        self.path, self.older = Path(self.folder, name), Path(self.folder, f"{name}.older")
        self._problem = ""

    def load(self) -> list[tuple[list[int], list[int]]]:
        """Return the newest prompts and answers of ``capacity`` tokens, oldest first. What is damaged is passed over. Never raises."""
        found: list[tuple[list[int], list[int]]] = []
        room = self.capacity
        try:
            make_private(self.folder)
            user_directories.check_private(self.folder, forbidden=0o022)
            for path in filter(Path.exists, (self.path, self.older)):
                with path.open("rb") as file:
                    file.seek(-min(path.stat().st_size, _BYTES * self.capacity), os.SEEK_END)
                    for line in reversed(file.read().splitlines()):
                        answer = self._answer(line) if room > 0 else None
                        if answer is not None:
                            found.append(answer)
                            room -= len(answer[0]) + len(answer[1])
        except OSError as error:
            self._fault(error)
        return found[::-1]

    def append(self, prompt: int, tokens: list[int]) -> None:
        """Append an answer: all its tokens, the first ``prompt`` of which were asked. Never raises."""
        if len(tokens) <= prompt:
            return
        try:
            user_directories.check_private(self.folder, forbidden=0o022)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:  # behind what was cut short, as when the disk was full
                line = json.dumps([prompt, list(map(int, tokens))], separators=(",", ":"))
                if os.write(file, f"\n{line}\n".encode()) < len(line) + 2:
                    raise OSError("the disk is full")
                is_full = os.fstat(file).st_size > _BYTES * self.capacity
            finally:
                os.close(file)
            if is_full:
                with contextlib.suppress(FileNotFoundError):  # another engine has done so
                    os.replace(self.path, self.older)
        except OSError as error:
            self._fault(error)

    def _answer(self, line: bytes) -> tuple[list[int], list[int]] | None:
        try:
            prompt, tokens = json.loads(line)
            if {type(one) for one in (prompt, *tokens)} == {int} and 0 <= prompt < len(tokens):
                return (
                    (tokens[:prompt], tokens[prompt:])
                    if 0 <= min(tokens) <= max(tokens) < self.vocabulary
                    else None
                )
        except (ValueError, TypeError, RecursionError):
            pass
        return None

    def _fault(self, error: OSError) -> None:
        if str(error) != self._problem:
            logger.warning("answers are not kept in %s: %s", self.path, error)
        self._problem = str(error)
