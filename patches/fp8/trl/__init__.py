"""Patches of TRL's trainers that generate with vLLM."""

from flashpatch.patches.fp8.trl import generate_and_score, sync_weights

PATCHES = (sync_weights.PATCH, generate_and_score.PATCH)
