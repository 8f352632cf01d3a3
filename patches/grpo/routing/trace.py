"""Record what requests a job made, as JSON lines that `benchmarks/router.py` can replay."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable


class Trace:
    """Write one line per complete response.

    Fields: ``step``, counted up when no request is left; ``prompt``, a number per prompt; ``prompt_tokens``;
    ``turn``; ``tokens`` of the response; ``server``; ``seconds``.

    Args:
        path: written anew, with mode 0600; the directory must exist.
    """

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o600), "w", buffering=1)
        self._prompts: dict[Hashable, int] = {}
        self.step = 0

    def write(
        self, prompt: Hashable, prompt_tokens: int, turn: int, tokens: int, server: str, seconds: float
    ) -> None:
        """Write a line."""
        number = self._prompts.setdefault(prompt, len(self._prompts))
        line = {"step": self.step, "prompt": number, "prompt_tokens": prompt_tokens, "turn": turn}
        line |= {"tokens": tokens, "server": server, "seconds": round(seconds, 4)}
        self._file.write(json.dumps(line) + "\n")
