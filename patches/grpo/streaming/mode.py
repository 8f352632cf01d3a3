"""Add the trainer mode ``stream_async`` to verl's registry of trainers."""

from __future__ import annotations

from typing import Any

from flashpatch.patches.grpo.streaming import BASE, ID, MODE
from flashpatch.record import Contract, Patch


def on_get(original, name: str, *args: Any, **kwargs: Any) -> Any:
    """Register the mode before verl looks it up; other modes pass."""
    if name == MODE:
        from flashpatch.patches.grpo.streaming import trainer  # noqa: F401  registers itself
    return original(name, *args, **kwargs)


PATCH = Patch(
    id=ID,
    targets=(f"{BASE}:get_trainer_cls",),
    requires="verl>=0.9",
    wrapper=on_get,
    contract=Contract(
        params=("name",),
        mentions=("TRAINER_REGISTRY",),
        exists=(
            f"{BASE}:register_trainer",
            f"{BASE}:PPOTrainer._compute_advantage",
            f"{BASE}:PPOTrainer._compute_old_log_prob",
            f"{BASE}:PPOTrainer._init_resource_pool_mgr",
            f"{BASE}:PPOTrainer._rollout_server_managers",
            "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._evict_terminal_groups",
            "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._has_enough_samples",
            "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._materialize_batch",
            "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._sampleable_terminal_keys",
            "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._select_prompt_uids",
            "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._sync_metadata_from_transfer_queue",
            "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync._terminal_eviction_reasons",
            "verl.trainer.ppo.v1.replay_buffer:_accumulate_eviction_metrics",
            "verl.checkpoint_engine.base:CheckpointEngineManager.add_replicas",
            "verl.checkpoint_engine.base:CheckpointEngineManager.remove_replicas",
            "verl.experimental.agent_loop.agent_loop:AgentLoopManager._init_agent_loop_workers",
            "verl.experimental.separation.engine_workers:DetachActorWorker",
            "verl.workers.engine_workers:TrainingWorker._postprocess_output",
            "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient",
            "verl.workers.rollout.replica:RolloutReplica.init_standalone",
            "verl.workers.utils.padding:response_from_nested",
            "verl.workers.utils.padding:response_to_nested",
        ),
    ),
    evidence="optional",  # a job of another mode looks up another trainer
    scope=frozenset({"driver"}),
    why="verl's asynchronous trainers wait for a whole mini-batch: its longest response decides when training starts.",
    how=f'Registers the trainer mode "{MODE}", which trains on groups as they end, when a job asks for it.',
    remove_when="verl has a trainer that accumulates gradients while groups still arrive.",
)
