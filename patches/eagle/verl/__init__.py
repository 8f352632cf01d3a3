"""The family under verl: drafters trained between rollouts, and brought to every replica with the policy."""

from __future__ import annotations

from flashpatch.patches.eagle.verl import manager, recipe, server

PATCHES = (recipe.PATCH, server.PATCH, manager.IDLE, manager.UPDATE, manager.LOG)
