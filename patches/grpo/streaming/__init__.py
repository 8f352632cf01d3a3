"""Train on groups as they end: verl's trainer mode ``stream_async``."""

from __future__ import annotations

from flashpatch.patches._shared.verl_config import Get

MODE = "stream_async"
ID = "grpo.verl.get_trainer_cls"
BASE = "verl.trainer.ppo.v1.trainer_base"
"""verl's module with the trainers' registry."""


def asked(get: Get) -> bool:
    """Whether the job is to run in this mode."""
    return bool(get("trainer.use_v1", True)) and get("trainer.v1.trainer_mode") == MODE
