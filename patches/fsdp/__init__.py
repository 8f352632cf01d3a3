"""Audit verl's weight syncs: compare what a rollout engine loads with the trainer's shards."""

from __future__ import annotations

from flashpatch.patches.fsdp import export, hybrid_sharding, verl_config
from flashpatch.patches.fsdp.sglang import PATCHES as SGLANG
from flashpatch.patches.fsdp.sglang_0_5_12 import PATCHES as SGLANG_0_5_12
from flashpatch.patches.fsdp.verl_vllm import PATCHES as VERL_VLLM
from flashpatch.patches.fsdp.verl_vllm.receiver import TARGET as VLLM_RECEIVES
from flashpatch.record import Family, Option

FAMILY = Family(
    name="fsdp",
    summary="checks verl's weight syncs against the trainer's shards; keeps FSDP1 replicas one model",
    patches=(export.PATCH, hybrid_sharding.PATCH, verl_config.PATCH, *VERL_VLLM, *SGLANG, *SGLANG_0_5_12),
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
        VLLM_RECEIVES,
        "sglang.srt.managers.scheduler:Scheduler.__init__",
    ),
)
