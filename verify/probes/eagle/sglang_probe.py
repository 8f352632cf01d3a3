"""What the probe needs to know of SGLang: the job, its drafters, its environment, and the patches that it must call."""

from __future__ import annotations

from functools import partial

from flashpatch.verify.probes.eagle import sglang_job
from flashpatch.verify.probes.eagle.rounds import write_drafters

JOB = sglang_job.__name__
ENVIRONMENT: dict[str, str] = {}
MORE = {
    "worker": (
        "verify",
        "forward_prefill_batch",
        "release_kv_cache",
        "init_weight_updater",
        "begin_weight_update",
        "end_weight_update",
    )
}
"""Patches that the job must have called beside those that are due by their records, by role."""

models = partial(write_drafters, engine="sglang")
"""Write the drafters to a directory."""
