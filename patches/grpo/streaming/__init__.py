"""Train on groups as they end: verl's trainer mode ``stream_async``."""

MODE = "stream_async"
ID = "grpo.verl.get_trainer_cls"
BASE = "verl.trainer.ppo.v1.trainer_base"
"""verl's module with the trainers' registry."""
