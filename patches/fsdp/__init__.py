"""Resharding that can be trusted: the weights a rollout engine gets are those of the trainer's shards."""

from __future__ import annotations

from flashpatch.patches.fsdp import export, hybrid_sharding, receive, verl_config
from flashpatch.record import Family, Option

FAMILY = Family(
    name="fsdp",
    summary="verl's weight syncs checked against the trainer's shards; replicas that stay together",
    patches=(export.PATCH, receive.PATCH, hybrid_sharding.PATCH, verl_config.PATCH),
    options={
        "audit": Option(
            "refuse",
            "weights that are not the trainer's: refuse the update, report it, or off: do not look",
            ("refuse", "report", "off"),
        ),
        "audit_every": Option(1, "look at every how manieth sync", kind=int),
    },
    refuses=("verl.utils.config:validate_config", receive.TARGET),
)
