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

SAVED = """
    import torch
    from torch.distributed.fsdp import fully_shard
    from verl.utils import fsdp_utils
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    fully_shard(model[0], mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    old = [p.detach().clone() for p in model.parameters()]
    saved, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, saved, spec)
    def full(tensor):
        return getattr(tensor, "full_tensor", lambda: tensor)()
    back = [torch.equal(full(p.detach()), full(before)) for p, before in zip(model.parameters(), old)]
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


def test_saved_parameters_stay_as_they_were(scenario):
    scenario(f"""{SAVED}
    assert all(back), back
    owned = [shard.untyped_storage().data_ptr() for shard, _ in saved.values()]
    assert len(owned) == 4 and len(set(owned)) == 4
    """)
