"""verl's ``separate_async`` runs on a CPU with the patches."""

import pytest

pytestmark = pytest.mark.verl

SETUP = """
    import io, logging
    from types import SimpleNamespace
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import trainer_separate_async as module
    said = io.StringIO()
    module.logger.addHandler(logging.StreamHandler(said))
    trainer = object.__new__(module.PPOTrainerSeparateAsync)
    rollout = {"prometheus": {"enable": False}, "checkpoint_engine": {
        "_target_": "verl.workers.config.CheckpointEngineConfig", "backend": "naive"}}
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    trainer.actor_rollout_wg, trainer._enable_hybrid_replicas = None, False
    trainer.llm_server_manager = SimpleNamespace(rollout_replicas=[])
    module.PPOTrainer._setup = lambda self: None  # engines and workers: not what this is about
    replicas = SimpleNamespace(get_replicas=lambda: ["one", "two"])
    module.LLMServerManager.create = classmethod(lambda cls, **settings: replicas)
    before = module.logger
"""


def test_a_trainer_without_rollouts_beside_it_is_set_up(scenario):
    scenario(f"""{SETUP}
    trainer._setup()
    assert trainer.current_mode is module.HybridEngineMode.TRAINER
    assert "served by 2 standalone replicas only" in said.getvalue(), said.getvalue()
    assert module.logger is before
    from flashpatch import engine
    assert engine.statuses()["cpu.verl.separate_async_setup"].calls == 1
    """)
