"""Patches of ms-swift's side of a rollout engine."""

from flashpatch.patches.fp8.swift import finish_weight_reload

PATCHES = (finish_weight_reload.PATCH,)
