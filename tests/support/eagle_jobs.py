"""Run one job of an engine in a process of its own; the job writes what it saw to a directory.

python eagle_jobs.py JOB DIRECTORY [NAMES]"""

import sys
from pathlib import Path

import eagle_job_capture
import eagle_job_history
import eagle_job_refit
from vllm_lab import imported

JOBS = {**vars(eagle_job_capture), **vars(eagle_job_history), **vars(eagle_job_refit)}


if __name__ == "__main__":
    import flashpatch

    imported.inspect_here()
    if sys.argv[1] == "stock":
        JOBS["stock"](Path(sys.argv[2]))
    flashpatch.enable(
        *sys.argv[3].split(","),
        strict=True,
        samples="" if sys.argv[1].startswith("history") else f"{sys.argv[2]}/queue",
        history_tokens=300_000,
        history=sys.argv[1].startswith("history"),
    )
    JOBS[sys.argv[1]](Path(sys.argv[2]))
