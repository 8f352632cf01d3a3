"""Define verl's trainer mode ``stream_async``: groups are trained on as they end, while others are generated.

Trainer and rollout run on devices of their own, as in verl's ``separate_async``. Where that mode waits for a whole
mini-batch, this one packs each group into rounds as soon as it has ended, accumulates their gradients, and steps the
optimizer once after the last one (async-grpo's pipeline). Imports verl; only `flashpatch.patches.grpo.streaming.get_trainer_cls`
imports this."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.checkpoint_engine import CheckpointEngineManager
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.utils import update_prometheus_config

from flashpatch import engine
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import having
from flashpatch.patches._shared.verl_config import STREAM
from flashpatch.patches.grpo.streaming import ID, groups, staleness
from flashpatch.patches.grpo.streaming.dispatch import Dispatcher
from flashpatch.patches.grpo.streaming.replicas import Replicas
from flashpatch.patches.grpo.streaming.rounds import Rounds
from flashpatch.patches.grpo.streaming.worker import CORRECTION, StreamWorker

logger = logging.getLogger("flashpatch.grpo")

POLL = 0.05
"""Seconds between two looks for groups that have ended."""


@register_trainer(STREAM)
class PPOTrainerStreamAsync(PPOTrainer):
    """Train on groups as they end.

    Args:
        config: verl's configuration, as checked by ``grpo.verl.validate_config``."""

    _loaded_reference = False
    _enable_hybrid_replicas = False  # read by verl: no rollout engines on the trainer's devices

    def _build_replay_buffer(self) -> Any:
        groups.refuse_others()
        return super()._build_replay_buffer()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            if str(role) in ("actor", "ref"):
                self.role_worker_mapping[role] = ray.remote(StreamWorker)

    def _setup(self) -> None:
        super()._setup()
        self.server_manager = LLMServerManager.create(config=self.config, start_rank=0)
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.prometheus.enable:
            update_prometheus_config(rollout.prometheus, self.server_manager.server_addresses, rollout.name)
        self.replicas = Replicas(
            self.server_manager,
            CheckpointEngineManager(
                config=omega_conf_to_dataclass(rollout.checkpoint_engine),
                actor_wg=self.actor_rollout_wg,
                replicas=self.server_manager.get_replicas(),
            ),
        )

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, with prompts of dead agent loop workers dispatched again, in validation too."""
        dispatcher = Dispatcher(agent_loop_manager, self._forget_client)

        def recover() -> None:
            self.replicas.look()
            waiting = groups.in_flight(self.replay_buffer, groups.VALIDATION)
            dispatcher.recover(waiting, groups.VALIDATION)

        groups.at_each_look(self.replay_buffer, recover)
        super().fit(dispatcher)
        dispatcher.end()

    def _forget_client(self, client: str) -> None:
        """Let grpo's balancer give a dead client's places back; verl's has no places."""
        balancer = self.server_manager.global_load_balancer
        if hasattr(balancer, "forget_client"):
            ray.get(balancer.forget_client.remote(client))

    def get_llm_client(self) -> Any:
        """Return the client that resumes requests which an update of the weights has stopped."""
        return self.server_manager.get_client(client_cls=FullyAsyncLLMServerClient)

    def on_init_end(self) -> None:
        """Send the weights, those of a checkpoint if one was loaded, to the rollout servers."""
        self.replicas.update_weights(self.global_steps)

    def on_train_begin(self) -> None:
        """Dispatch prompts ahead of the first step, as many as ``separate_async`` would."""
        groups.clear_trained()
        self._add_async_warmup_batches(self.config.trainer.v1.separate_async.num_warmup_batches)

    def on_sample_end(self) -> None:
        """Do nothing; verl's base class asks for it."""

    def on_step_end(self) -> None:
        """Send the new weights to the rollout servers, and end what verl's profiler began for this step."""
        if self.prev_step_profile:
            self._stop_rollout_profiling()
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self._pending_sync_metrics = self.replicas.update_weights(self.global_steps)

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        """Take groups as they end, accumulate their gradients round by round, and step the optimizer once.

        Args:
            metrics: gets verl's metrics of the step, and those under ``stream/``.
            timing_raw: gets verl's timings; ``gen`` is the time for which the trainer had nothing to do."""
        engine.record_call(ID)
        metrics.update(self.prepare_step() or {})
        wanted, taken, stale, dry = self.config.data.train_batch_size, 0, 0, 0.0
        start = time.perf_counter()
        rounds = self._rounds()
        while taken < wanted:
            batch = groups.take(self.replay_buffer, self.global_steps, wanted - taken, metrics)
            if not batch.keys:
                rounds.fill()
                waiting = groups.in_flight(self.replay_buffer)
                self.agent_loop_manager.recover(waiting)
                time.sleep(POLL)
                dry += POLL * (not waiting)
                continue
            self.agent_loop_manager.forget(groups.uids(batch))
            batch, old = self._young(batch)
            stale += old
            if not batch.keys:
                continue
            taken += len(groups.uids(batch))
            self._refuse_rejected_turns(batch)
            batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
            with marked_timer("adv", timing_raw, color="brown"), self._without_correction():
                self._compute_advantage(batch, metrics)
            rounds.add(batch)
            rounds.idle()  # raises if a rank has failed
        last = time.perf_counter()
        found = rounds.finish()
        end = time.perf_counter()
        busy = found.pop("busy")
        timing_raw["update_actor"] = busy
        timing_raw["gen"] = max(end - start - busy, 0.0)
        metrics.update(_of_actor(found))
        metrics.update(
            {
                "stream/rounds": rounds.launched,
                "stream/fillers": rounds.fillers,
                "stream/first_round_s": rounds.first,
                "stream/last_group_s": last - start,
                "stream/trainer_idle_s": timing_raw["gen"],
                "stream/rollout_idle_s": dry,
                "stream/stale_groups": stale,
                "stream/tokens_per_s": sum(tag["seq_len"] for tag in rounds.tags) / (end - start),
            }
        )
        whole = KVBatchMeta(partition_id=groups.PARTITION, keys=rounds.keys, tags=rounds.tags)
        metrics.update(staleness.histogram(self._ages(whole)))
        self._measure(whole, metrics)
        if self._refreshes() and self.global_steps % engine.options("grpo")["reference_every"] == 0:
            self.ref_policy_wg.stream_refresh_reference()
        return whole

    def _ages(self, batch: KVBatchMeta) -> list[Counter[int]]:
        """Count the tokens of each sample by age."""
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields", "response_mask"]
        )
        extras = [getattr(extra, "data", extra) for extra in data["extra_fields"]]
        return [
            staleness.ages(tag, extra, self.global_steps, int((mask != 0).sum()))
            for tag, extra, mask in zip(batch.tags, extras, data["response_mask"].unbind(), strict=True)
        ]

    def _young(self, batch: KVBatchMeta) -> tuple[KVBatchMeta, int]:
        """Drop the groups with a token older than ``max_staleness``, and dispatch as many prompts for them."""
        bound = engine.options("grpo")["max_staleness"]
        if not bound:
            return batch, 0
        old = {
            key.split("_")[0]
            for key, ages in zip(batch.keys, self._ages(batch), strict=True)
            if max(ages, default=0) > bound
        }
        if old:
            batch = groups.drop(batch, old)
            self._add_prompts_to_generate(len(old))
        return batch, len(old)

    def _refuse_rejected_turns(self, batch: KVBatchMeta) -> None:
        """Refuse rejection if a session has several outputs: verl gives those of a session whose last output is rejected
        no advantage, which is known after the forward alone."""
        rejection = OmegaConf.select(self.config, "algorithm.rollout_correction.rollout_rs")
        if rejection and any(key.rsplit("_", 2)[-1] != "0" for key in batch.keys):
            raise PatchError(
                f"cannot train with algorithm.rollout_correction.rollout_rs={rejection} on agent loops that return several "
                "outputs: advantages depend on what is rejected then.",
                patch=ID,
                target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage",
                advice="Unset rollout_rs, or choose another trainer.v1.trainer_mode.",
            )

    def _rounds(self) -> Rounds:
        actor = self.config.actor_rollout_ref.actor
        correction = self.config.algorithm.get("rollout_correction")
        rollout = self.config.actor_rollout_ref.rollout
        return Rounds(
            self.actor_rollout_wg,
            self.ref_policy_wg if self.use_reference_policy else None,
            actor.ppo_max_token_len_per_gpu,
            {
                "temperature": rollout.temperature,
                "calculate_entropy": True,
                "compute_loss": False,
                CORRECTION: OmegaConf.to_container(correction, resolve=True) if correction else None,
            },
        )

    @contextmanager
    def _without_correction(self) -> Iterator[None]:
        """Keep verl from computing importance weights, which need what the training forward has yet to find."""
        algorithm = self.config.algorithm
        kept = algorithm.get("rollout_correction")
        with open_dict(algorithm):
            algorithm.rollout_correction = None
        try:
            yield
        finally:
            with open_dict(algorithm):
                algorithm.rollout_correction = kept

    def _measure(self, batch: KVBatchMeta, metrics: dict) -> None:
        """Add verl's metrics of the policy's log-probabilities, which the rounds have left in the queue."""
        with having(self, "actor_rollout_wg", _Computed()):
            self._compute_old_log_prob(batch, metrics)
        correction = self.config.algorithm.get("rollout_correction")
        if correction and self.config.actor_rollout_ref.rollout.calculate_log_probs:
            names = ["old_log_probs", "rollout_log_probs", "response_mask"]
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
            data = DataProto(batch=data.to_padded_tensor())
            metrics.update(compute_rollout_correction_and_add_to_batch(data, correction)[1])

    def _save_checkpoint(self) -> None:
        """Save what verl saves, and the reference if it is or was refreshed, within the actor's folder: verl deletes that in time."""
        folder = self._reference_of(Path(self.config.trainer.default_local_dir))
        if self._refreshes() or self._loaded_reference:
            self.ref_policy_wg.stream_save_reference(str(folder))
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        """Load what verl loads, and the reference if the checkpoint holds one."""
        super()._load_checkpoint()
        trainer = self.config.trainer
        chosen = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        folder = self._reference_of(Path(trainer.default_local_dir), chosen)
        if self.global_steps and self.use_reference_policy:
            self._loaded_reference = any(self.ref_policy_wg.stream_load_reference(str(folder)))
        elif self.global_steps and folder.exists():
            logger.warning("%s is not loaded without use_kl_loss, and no later checkpoint holds it", folder)

    def _reference_of(self, root: Path, step: str | None = None) -> Path:
        return Path(step or root / f"global_step_{self.global_steps}").absolute() / "actor" / "reference"

    def _refreshes(self) -> bool:
        return self.use_reference_policy and engine.options("grpo")["reference_every"] > 0

    def _rollout_server_managers(self) -> list:
        managers = super()._rollout_server_managers()
        return [*managers, self.server_manager] if hasattr(self, "server_manager") else managers

    def _get_n_gpus_for_throughput(self) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        return self.resource_pool_manager.get_n_gpus() + rollout.n_gpus_per_node * rollout.nnodes


class _Computed:
    """Stand in for the workers where verl asks for log-probabilities that are in the queue already."""

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return batch


def _of_actor(found: dict[str, Any]) -> dict[str, float]:
    """Return the update's metrics under the names that verl gives them."""
    samples, tokens = found.pop("samples_trained"), found.pop("tokens_trained")
    named = reduce_metrics(rename_dict(found, "actor/"))
    named["perf/mfu/actor"] = named.pop("actor/mfu")
    return {name: float(value) for name, value in named.items()} | {
        "actor/samples": samples,
        "actor/tokens": tokens,
    }
