"""Patch verl: train drafters between rollouts, and send them to every replica after the policy."""

from __future__ import annotations

from flashpatch.patches.eagle.verl import checkpoint_manager, verl_config

PATCHES = (
    verl_config.PATCH,
    checkpoint_manager.IDLE,
    checkpoint_manager.UPDATE,
    checkpoint_manager.LOG,
)
