"""Register the trainer mode ``stream_async`` with verl."""

from __future__ import annotations

from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches.grpo.streaming import BASE, MODE

_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_WAITING = "_evict_terminal_groups _has_enough_samples _materialize_batch _sampleable_terminal_keys _select_prompt_uids "
_WAITING += "_sync_metadata_from_transfer_queue _terminal_eviction_reasons"
_TRAINER = "_compute_advantage _compute_old_log_prob _init_resource_pool_mgr _rollout_server_managers"
_TRAINING = "_postprocess_output infer_batch train_batch"


@Patches("grpo", "verl>=0.9", scope="driver").wrap(
    f"{BASE}:get_trainer_cls",
    relies_on=(
        *f"TRAINER_REGISTRY {BASE}:register_trainer {_BUFFER}:_accumulate_eviction_metrics".split(),
        *(f"{BASE}:PPOTrainer.{name}" for name in _TRAINER.split()),
        *(f"{_BUFFER}:ReplayBufferAsync.{name}" for name in _WAITING.split()),
        *(f"verl.workers.engine_workers:TrainingWorker.{name}" for name in _TRAINING.split()),
        *(
            f"verl.checkpoint_engine.base:CheckpointEngineManager.{name}_replicas"
            for name in ("add", "remove")
        ),
        *(f"verl.workers.utils.padding:response_{way}_nested" for way in ("from", "to")),
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
    if name == MODE:
        from flashpatch.patches.grpo.streaming import trainer  # noqa: F401  registers itself
    return original(name, *args, **kwargs)
