"""Start Ray on a busy machine.

Ray's raylet ends itself where its agent, a Python process, needs more than 15 seconds to come up, and ``ray.init`` then
fails after 30; neither has a setting. Beside other lanes of tests on two cores an agent can need more."""

import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAID = "The current node timed out during startup"
STARTED = b"Started a local Ray instance"
TIMES = 3


def ask_again() -> None:
    """Let ``ray.init`` of this process and its children try `TIMES` times where its node did not come up."""
    import ray

    original = ray.init

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        for left in reversed(range(TIMES)):
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if not left or SAID not in str(error):
                    raise
                ray.shutdown()

    ray.init = init


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Run a Ray of this process alone, in a directory of its own."""
    import ray

    with tempfile.TemporaryDirectory(prefix="fpr", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ask_again()
        sizes = dict(num_cpus=4, object_store_memory=80_000_000)
        ray.init(include_dashboard=False, _temp_dir=folder, log_to_driver=False, **sizes)
        try:
            yield
        finally:
            ray.shutdown()


def go_first(pid: int, log: Path) -> None:
    """Favour a session's processes until its Ray has started, where Linux groups by session and lets us.

    No longer, since what a job starts in sessions of its own, as a drafter's trainer is, would stand behind it."""
    group = Path(f"/proc/{os.getsid(pid)}/autogroup")
    if _favour(group, -5):
        threading.Thread(target=_until_started, args=(group, log), daemon=True).start()


def _until_started(group: Path, log: Path) -> None:
    while STARTED not in log.read_bytes():
        time.sleep(0.2)
        if not group.exists():  # the job has ended
            return
    _favour(group, 0)


def _favour(group: Path, nice: int) -> bool:
    try:
        group.write_text(str(nice))
    except OSError:
        return False
    return True
