"""Weight updates on SGLang: the same transaction, entered through SGLang's doors."""

from __future__ import annotations

from flashpatch.patches.fp8.sglang import arguments, birth, doors, gate, runner, session, spawn

PATCHES = (
    arguments.PATCH,
    birth.PATCH,
    birth.LOADED,
    doors.BEGIN,
    doors.FINISH,
    runner.TENSOR,
    runner.DISTRIBUTED,
    runner.DISK,
    runner.IPC,
    session.BEGIN,
    session.END,
    session.DISK,
    session.RELEASE,
    gate.INIT,
    gate.STEP,
    spawn.PATCH,
)
