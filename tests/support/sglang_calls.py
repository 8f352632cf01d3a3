"""Count FlashPatch's own calls of Python in the decode steps of a job's scheduler, into JOB_CALLS."""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


def install() -> None:
    """A step is what runs from one batch to the next; it is counted if that was a batch of one token each."""
    import sglang
    from felting.counting import Own
    from sglang.srt.managers.scheduler import Scheduler

    own, found, run = Own(sglang), [], Scheduler.run_batch
    begun: list[tuple[ExitStack, Any, bool]] = []

    def counted(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        while begun:
            step, calls, decodes = begun.pop()
            step.close()
            if decodes:
                found.append(calls["own"])
                Path(os.environ["JOB_CALLS"]).write_text(json.dumps(found))
        step = ExitStack()
        begun.append((step, step.enter_context(own.calls()), batch.forward_mode.is_decode()))
        return run(self, batch, *args, **kwargs)

    Scheduler.run_batch = counted
