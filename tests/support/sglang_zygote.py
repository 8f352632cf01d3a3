"""Imports SGLang once, then makes a process for each job by forking: importing it takes most of an engine's start.

Started by `sglang_lab`. Each line on its input is the folder of a job; the child writes its process id to
FOLDER/pid and the parent FOLDER/ended. FlashPatch is not in this process: a job's own environment switches it on in
the child, after the fork, as a user's ``flashpatch.enable`` would. Tests that are about the start of processes
do without this (``fresh=True``).
"""

from __future__ import annotations

import gc

gc.disable()  # a fifth of the time of all these imports

import json
import multiprocessing
import os
import sys
import threading
import traceback
from pathlib import Path

import amx_standin  # noqa: F401  before SGLang
import sglang  # noqa: F401
import sglang.srt.entrypoints.engine  # noqa: F401
import sglang.srt.managers.detokenizer_manager  # noqa: F401
import sglang.srt.managers.scheduler  # noqa: F401
import sglang.srt.model_executor.model_runner  # noqa: F401
import sglang.srt.models.registry  # noqa: F401  and with it every model
import sglang.srt.speculative.eagle_worker_v2  # noqa: F401
import sglang_job


def child(folder: Path) -> None:
    """Become the job's own process."""
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(json.loads((folder / "environment.json").read_text()))
    os.chdir(folder)
    (folder / "pid").write_text(str(os.getpid()))
    # SGLang would start its processes afresh, and each would import everything again.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    sglang_job.prepare()
    from flashpatch import bootstrap

    bootstrap.start()
    sglang_job.main(folder)


def main() -> None:
    gc.collect()
    gc.enable()
    gc.freeze()  # else a child's collections copy the pages of all that is imported
    print("ready", flush=True)
    for line in sys.stdin:
        folder = Path(line.strip())
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                child(folder)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        threading.Thread(target=_await, args=(pid, folder), daemon=True).start()


def _await(pid: int, folder: Path) -> None:
    # It stays a zombie: the number with which `sglang_lab` kills its session becomes nobody else's.
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    (folder / "ended").write_text(str(end.si_status))


if __name__ == "__main__":
    main()
