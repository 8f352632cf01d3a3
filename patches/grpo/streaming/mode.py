"""Register the trainer mode ``stream_async`` with verl."""

from __future__ import annotations

from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches._shared.verl_config import STREAM
from flashpatch.patches.grpo.streaming import BASE

_BUFFER = "verl.trainer.ppo.v1.replay_buffer"


@Patches("grpo", "verl>=0.9", scope="driver").wrap(
    f"{BASE}:get_trainer_cls",
    relies_on=(
        "TRAINER_REGISTRY",
        f"{BASE}:register_trainer",
        f"{_BUFFER}:_accumulate_eviction_metrics",
        f"{BASE}:PPOTrainer._compute_advantage",
        f"{BASE}:PPOTrainer._compute_old_log_prob",
        f"{BASE}:PPOTrainer._init_resource_pool_mgr",
        f"{BASE}:PPOTrainer._rollout_server_managers",
        f"{_BUFFER}:ReplayBufferAsync._evict_terminal_groups",
        f"{_BUFFER}:ReplayBufferAsync._has_enough_samples",
        f"{_BUFFER}:ReplayBufferAsync._materialize_batch",
        f"{_BUFFER}:ReplayBufferAsync._sampleable_terminal_keys",
        f"{_BUFFER}:ReplayBufferAsync._select_prompt_uids",
        f"{_BUFFER}:ReplayBufferAsync._sync_metadata_from_transfer_queue",
        f"{_BUFFER}:ReplayBufferAsync._terminal_eviction_reasons",
        "verl.checkpoint_engine.base:CheckpointEngineManager.add_replicas",
        "verl.checkpoint_engine.base:CheckpointEngineManager.remove_replicas",
        "verl.workers.engine_workers:TrainingWorker._postprocess_output",
        "verl.workers.engine_workers:TrainingWorker.infer_batch",
        "verl.workers.engine_workers:TrainingWorker.train_batch",
        "verl.workers.utils.padding:response_from_nested",
        "verl.workers.utils.padding:response_to_nested",
        "verl.experimental.agent_loop.agent_loop:AgentLoopManager._init_agent_loop_workers",
        "verl.experimental.separation.engine_workers:DetachActorWorker",
        "verl.utils.tensordict_utils:maybe_fix_3d_position_ids",
        "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient",
        "verl.workers.rollout.replica:RolloutReplica.init_standalone",
    ),
    evidence="optional",  # a job of another mode looks up another trainer
    why="verl's asynchronous trainers wait for a whole mini-batch: its longest response decides when training starts.",
    remove_when="verl has a trainer that accumulates gradients while groups still arrive.",
)
def get_trainer_cls(original, name: str, *args: Any, **kwargs: Any) -> Any:
    """Register the trainer mode "stream_async", which trains on groups as they end, when a job asks for it."""
    if name == STREAM:
        from flashpatch.patches.grpo.streaming import trainer  # noqa: F401  registers itself
    return original(name, *args, **kwargs)
