"""Follow the requests of one engine, whose tokens are drafted from, and report to the ledger."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

from flashpatch import ledger
from flashpatch.patches.eagle.history.drafts import HistoryDrafts, Text
from flashpatch.patches.eagle.history.history_file import HistoryFile

logger = logging.getLogger("flashpatch.eagle")

_NOTE_SECONDS = 1.0  # between two notes to the ledger


class EngineHistory:
    """Hold the drafts of one engine, and a `Text` for each of its requests that was seen.

    Args:
        capacity: tokens that are remembered.
        file: where answers are kept, or None.

    Attributes:
        drafts: what is drafted from.
        texts: by the engine's request."""

    def __init__(self, capacity: int, file: HistoryFile | None = None) -> None:
        self.drafts, self.file = HistoryDrafts(capacity), file
        self.texts: weakref.WeakKeyDictionary[Any, Text] = weakref.WeakKeyDictionary()
        self._noted, self._told = 0.0, False
        for prompt, answer in file.load() if file is not None else ():
            self.drafts.extend(self.drafts.begin(prompt), answer)

    def take_tokens(self, request: Any, prompt: Sequence[int], tokens: Sequence[int], start: int = 0) -> int:
        """Take up what a request has generated since the last call, ``tokens`` from position ``start`` on; return how
        many."""
        text = self.texts.get(request)
        if text is None:
            text = self.texts[request] = self.drafts.begin(prompt)
            if self.file is not None:  # as the request goes, or with the engine
                weakref.finalize(request, self.file.append, len(prompt), text.tokens)
        new = list(tokens[len(text.tokens) - start :])
        if new:
            self.drafts.extend(text, new)
        return len(new)

    def note_if_due(self) -> None:
        """Write counts to the ledger, once a second."""
        now, is_first = time.monotonic(), self.drafts.drafted and not self._told
        if is_first or now - self._noted > _NOTE_SECONDS:
            self._noted, self._told = now, bool(self.drafts.drafted)
            ledger.note(eagle_history=self.drafts.metrics())


def say_off(reason: str, error: Exception | None = None) -> None:
    """Say why an engine drafts nothing from history, or, after an error, nothing any more."""
    logger.warning(
        "no drafts from history%s: %s", " any more" if error is not None else "", reason, exc_info=error
    )
    ledger.note(eagle_history_off=reason)
