"""Send weights from a trainer's processes to separate rollout processes through host memory and gloo.

Importing this package registers verl's checkpoint engine ``gloo``. It needs verl and torch, no accelerator, and no
family to be on: ``actor_rollout_ref.rollout.checkpoint_engine`` with ``backend=gloo`` and
``custom_backend_module=flashpatch.patches.cpu.checkpoint_engine``. With ``cpu`` on, a job that separates trainer and
rollout gets both settings by itself.
"""

from __future__ import annotations

from verl.checkpoint_engine.base import CheckpointEngineRegistry

from flashpatch.patches.cpu.checkpoint_engine.gloo_engine import BACKEND, GlooCheckpointEngine

if BACKEND not in CheckpointEngineRegistry._registry:  # one of verl's own stays
    CheckpointEngineRegistry.register(BACKEND)(GlooCheckpointEngine)

__all__ = ["BACKEND", "GlooCheckpointEngine"]
