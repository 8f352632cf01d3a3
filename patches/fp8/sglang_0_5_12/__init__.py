"""Update weights on SGLang 0.5.12, which stock verl 0.9.1 installs: a generation without update sessions of its own.

Its buckets come as requests of their own. A sender that opens a session by name (`sglang_sessions`), as FlashPatch's part of
verl's client does, ends it by name; without one an update is over when everything has come.
"""

from __future__ import annotations

from flashpatch.patches.fp8.sglang_0_5_12 import (
    arguments,
    model,
    model_runner,
    processes,
    scheduler,
    tokenizer,
)

PATCHES = (
    arguments.PATCH,
    model.PATCH,
    model.LOADED,
    model_runner.LOAD,
    model_runner.TENSOR,
    model_runner.DISTRIBUTED,
    model_runner.DISK,
    model_runner.IPC,
    scheduler.TENSOR,
    scheduler.DISTRIBUTED,
    scheduler.DISK,
    scheduler.RELEASE,
    scheduler.RESUME,
    scheduler.CHECK,
    tokenizer.TENSOR,
    tokenizer.DISTRIBUTED,
    processes.INIT,
    processes.STEP,
    processes.LAUNCH,
)
