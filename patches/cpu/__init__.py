"""Run verl on a machine without an accelerator: gloo, FSDP on the CPU, vLLM's or SGLang's CPU engine."""

from __future__ import annotations

from flashpatch.patches.cpu import (
    engines,
    fsdp,
    gloo,
    model_inspection,
    platform,
    separate_async,
    sglang_tensors,
    ulysses,
    verl_config,
    vllm_distribution,
)
from flashpatch.record import Family

FAMILY = Family(
    name="cpu",
    summary="verl, unmodified, on a machine without an accelerator",
    patches=(
        platform.PATCH,
        vllm_distribution.PATCH,
        verl_config.PATCH,
        verl_config.RUN,
        engines.PATCH,
        gloo.RAY,
        gloo.LAUNCHER,
        fsdp.SYNC,
        fsdp.PIN,
        fsdp.OFFLOAD,
        separate_async.SETUP,
        separate_async.SAVE,
        model_inspection.PATCH,
        sglang_tensors.SHARE,
        sglang_tensors.ADAPTER,
        sglang_tensors.REDUCE,
        ulysses.PATCH,
    ),
    too_late=platform.too_late,
    refuses=("verl.utils.config:validate_config",),
)
