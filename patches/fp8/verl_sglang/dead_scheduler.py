"""End verl's SGLang server when one of its schedulers has died.

SGLang's watchdog sends its own process SIGQUIT, whose handler ends it. In a Ray actor handlers run when Ray's loop comes back
to Python, which may be never: the server stays, answers nothing, and the trainer waits until its time limit.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.fp8")

GRACE = 10.0
"""Seconds that SGLang's own handler has to end the process."""


def on_check(original, self, *args: Any, **kwargs: Any) -> bool:
    """Around ``SubprocessWatchdog._check_processes``, in the watchdog's thread: kill what outlives SGLang's signal."""
    crashed = original(self, *args, **kwargs)
    if crashed:
        time.sleep(GRACE)  # SGLang's handler mostly ends the process meanwhile
        _end_process()
    return crashed


def _end_process() -> None:
    import psutil

    logger.error("a scheduler of this SGLang server died, and the server is still there: ending it")
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os.kill(os.getpid(), signal.SIGKILL)


PATCH = Patch(
    id="fp8.verl_sglang.check_processes",
    targets=("sglang.srt.utils.watchdog:SubprocessWatchdog._check_processes",),
    requires="sglang>=0.5.20",
    tested=("0.5.21", "0.5.23"),
    wrapper=on_check,
    contract=Contract(
        mentions=("self._processes", "signal.SIGQUIT"),
        exists=("sglang.srt.utils.watchdog:SubprocessWatchdog._monitor_loop",),
    ),
    evidence="optional",  # only a death calls for it
    scope=frozenset({"driver"}),
    why="SGLang's server ends itself by a signal when a scheduler dies; in verl's Ray actor that signal's handler may never "
    "run, and the trainer waits for a server that answers nothing.",
    how=f"Kills the server and its children when it is still there {GRACE:g} s after the signal.",
    remove_when="SGLang's watchdog ends the process without a handler in the main thread.",
)
