"""Audit the weights that SGLang's schedulers receive: from the beginning of an update session to its end."""

from __future__ import annotations

from flashpatch.patches.fsdp.sglang import update_session, weight_updater

PATCHES = (update_session.BEGIN, weight_updater.TENSOR, weight_updater.END, update_session.END)
"""The patches of this group."""
