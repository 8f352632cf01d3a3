"""Update weights on SGLang: the same refit, called from SGLang's update functions."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.fp8.sglang import (
    engine_args,
    memory,
    model,
    schedulers,
    update_session,
    weight_updater,
)

PATCHES = collected(engine_args, model, weight_updater, update_session, memory, schedulers)
