"""Start Ray on a busy machine.

Ray's raylet ends itself where its agent, a Python process, needs more than 15 seconds to come up, and ``ray.init`` then
fails after 30; neither has a setting. Beside other lanes of tests on two cores an agent can need more.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

SAID = "The current node timed out during startup"
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


def go_first(pid: int) -> None:
    """Give a session's processes more of the processor than other sessions, where Linux groups by them and lets us."""
    try:
        Path(f"/proc/{os.getsid(pid)}/autogroup").write_text("-5")
    except OSError:
        pass
