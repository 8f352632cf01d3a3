"""Audit verl's weight syncs: compare what a rollout engine loads with the trainer's shards."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.fsdp import arrival, sglang, sglang_0_5_12, trainer, verl_config
from flashpatch.record import Family, Option

FAMILY = Family(
    name="fsdp",
    summary="checks verl's weight syncs against the trainer's shards; keeps FSDP1 replicas one model",
    patches=collected(trainer, verl_config, arrival, sglang, sglang_0_5_12),
    options={
        "audit": Option(
            "refuse",
            "when weights differ from the trainer's: refuse the update, report it, or off: no audit",
            ("refuse", "report", "off"),
        ),
        "audit_every": Option(1, "audit every n-th weight sync", kind=int, least=1),
    },
    refuses=(
        "verl.utils.config:validate_config",
        arrival.TARGET,
        "sglang.srt.managers.scheduler:Scheduler.__init__",
    ),
)
