"""Patch verl: train drafters between rollouts, and send them to every replica after the policy."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.eagle.verl import cotraining, old_log_probs, verl_config

PATCHES = collected(verl_config, cotraining, old_log_probs)
