"""Run FastRL's adaptive speculative rollouts on stock engines: capture, a bandit, drafter co-training."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.eagle import options, sglang, verl, verl_sglang, verl_vllm, vllm, vllm_0_24
from flashpatch.record import Family

FAMILY = Family(
    name="eagle",
    summary="adaptive speculative rollouts: hidden-state capture, tokens per step by a bandit, drafter co-training",
    patches=(
        *vllm.PATCHES,
        *collected(vllm_0_24),
        *sglang.PATCHES,
        *verl.PATCHES,
        *collected(verl_vllm, verl_sglang),
    ),
    options=options.OPTIONS,
    refuses=("sglang.srt.managers.scheduler:Scheduler.__init__",),
    commands={"eagle-warmup": "flashpatch.patches.eagle.vllm.warmup"},
)
