"""Run FastRL's adaptive speculative rollouts on stock engines: capture, a bandit, drafter co-training."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches._shared import instances
from flashpatch.patches.eagle import options, sglang, verl, verl_sglang, verl_vllm, vllm, vllm_0_24
from flashpatch.record import Family


def _too_late() -> str | None:
    """Return a sentence if an engine was opened before the family was enabled."""
    late = len(instances.of_modules({**instances.VLLM, **instances.SGLANG}))
    return (
        f"{late} engine(s) exist already and draft as they did; build them after enabling." if late else None
    )


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
    too_late=_too_late,
    refuses=("sglang.srt.managers.scheduler:Scheduler.__init__",),
    commands={"eagle-warmup": "flashpatch.patches.eagle.vllm.warmup"},
)
