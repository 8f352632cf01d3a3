"""Update weights on SGLang: the same refit, called from SGLang's update functions."""

from __future__ import annotations

from flashpatch.patches.fp8.sglang import (
    engine_args,
    expected_processes,
    initialize_model,
    kept_tokens,
    memory,
    reload,
    scheduler_gate,
    update_session,
    weight_checker,
    weight_updater,
    weight_version,
)

PATCHES = (
    engine_args.PATCH,
    initialize_model.PATCH,
    initialize_model.LOADED,
    reload.BEGIN,
    reload.FINISH,
    weight_updater.TENSOR,
    weight_updater.DISTRIBUTED,
    weight_updater.DISK,
    weight_updater.IPC,
    update_session.BEGIN,
    update_session.END,
    update_session.DISK,
    memory.RELEASE,
    memory.RESUME,
    weight_checker.PATCH,
    weight_version.RECORD,
    weight_version.PROVIDED,
    weight_version.BEGIN,
    weight_version.END,
    scheduler_gate.INIT,
    scheduler_gate.STEP,
    kept_tokens.PATCH,
    expected_processes.PATCH,
)
