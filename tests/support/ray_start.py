"""Let `ray.init` wait for its node as long as a busy machine needs."""

from __future__ import annotations

import time
from typing import Any

LONGEST = 300.0


def wait_longer() -> None:
    """Wait up to `LONGEST` seconds for a node to register; Ray's own limit is 30, and it has no setting for it.

    ``ray/_private/node.py`` asks ``services.get_node`` until its 30 seconds are over. A node that starts beside three
    lanes of tests on two cores can need more.
    """
    from ray._private import services

    asked = services.get_node

    def get_node(*args: Any, **kwargs: Any) -> Any:
        end = time.monotonic() + LONGEST
        while True:
            try:
                return asked(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    services.get_node = get_node
