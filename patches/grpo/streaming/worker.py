"""Give verl's training worker rounds instead of batches. Imports verl; only the mode's trainer imports this."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import response_from_nested

from flashpatch.patches.grpo.streaming import divisor, reference
from flashpatch.patches.grpo.streaming.step import CurrentPolicy, StreamedStep, number, refuse_draws, times

REFERENCE = "stream_reference"
"""Key of a round's extra fields: whether the reference's log-probabilities are wanted."""
FILLER = "stream_filler"
"""Key of a round's extra fields: this rank's samples are another rank's, and count nothing."""
CORRECTION = "stream_correction"
"""Key of a round's extra fields: ``algorithm.rollout_correction``."""


_of_this_process: dict[str, StreamWorker] = {}
"""By role: verl puts a rank's actor and its reference into one process."""


class StreamWorker(DetachActorWorker):
    """Add a method for each part of a streamed step to verl's worker."""

    _open: _OpenStep | None = None
    _asked = False
    _policy = property(lambda self: _of_this_process["actor"].actor.engine.module)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model as verl does. Raises PatchError if the actor's loss cannot be streamed, such as one that only
        the trainer's processes register."""
        super().init_model()
        if "actor" in self.role:  # now that a user's own library has registered its losses
            divisor.of_actor(self.config.actor, POLICY_LOSS_REGISTRY)
        _of_this_process[self.role] = self

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def stream_accumulate(self, data: TensorDict) -> TensorDict | None:
        """Run the forward passes and the backward pass of this rank's share of a round; add to the step's gradient.

        The reference's forward belongs to the same call: Ray may begin the calls of verl's workers in another order
        than that in which they were made, since these have a coroutine among their methods, and another on each
        rank. A round's sum does not depend on when it is added.

        Returns:
            ``log_probs`` and ``entropy`` of the policy, jagged [samples, prompt and response], and the reference's
            ``ref_log_prob``, jagged [samples, response], if it is wanted; None for a filler.

        Raises:
            PatchError: see `refuse_draws`; in the first round."""
        plain, self._asked = None if self._asked else _log_probs(self.actor, data), True
        if self._open is None:
            self._open = _OpenStep(self, tu.get(data, CORRECTION))
        try:
            return self._open.add(data, plain)
        except BaseException:
            self._open.close()
            raise

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stream_finish(self) -> dict[str, Any] | None:
        """Divide the gradient by what came, clip it, step optimizer and schedule; return metrics as of verl's
        ``update_actor``, over all ranks, and under ``busy`` the seconds of this rank's rounds; None on ranks that verl
        collects nothing from."""
        step, self._open = self._open, None
        if step is None:
            raise RuntimeError("stream_finish() before any stream_accumulate()")
        return step.finish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stream_refresh_reference(self) -> None:
        """Make the reference model what the policy is now."""
        reference.copy_policy(self._policy, self.ref.engine.module)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stream_save_reference(self, folder: str) -> None:
        """Write this rank's part of the reference model below ``folder``."""
        reference.save(self.ref.engine.module, self._policy, Path(folder), self.rank, self.world_size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stream_load_reference(self, folder: str) -> bool:
        """Read this rank's part of the reference model from ``folder``; return whether there is one."""
        return reference.load(self.ref.engine.module, self._policy, Path(folder), self.rank, self.world_size)


class _OpenStep:
    def __init__(self, worker: StreamWorker, correction: dict[str, Any] | None) -> None:
        actor = worker.config.actor
        self.worker, self.engine = worker.actor, worker.actor.engine
        self.policy = CurrentPolicy(correction, bool(actor.entropy_coeff))
        unit, expected = (
            divisor.of_actor(actor, POLICY_LOSS_REGISTRY),
            actor.ppo_mini_batch_size * actor.rollout_n,
        )
        self.step = StreamedStep(self.engine, unit, self.policy, expected)
        self.busy = 0.0
        self.losses: list[torch.Tensor] = []
        self.metrics: dict[str, Any] = {}
        self.lengths: list[int] = []
        self._context = ExitStack()
        self._context.enter_context(self.engine.train_mode())
        self.engine.optimizer_zero_grad()

    def close(self) -> None:
        """Leave the engine's training mode; gradients go to zero."""
        self._context.close()

    def add(self, data: TensorDict, plain: torch.Tensor | None = None) -> TensorDict | None:
        start = time.perf_counter()
        filler = bool(tu.get(data, FILLER, default=False))
        if filler:
            for name in ("response_mask", "loss_mask"):
                data[name] = torch.zeros_like(data[name])
        else:
            self.lengths += data["input_ids"].offsets().diff().tolist()
        wanted = tu.get(data, REFERENCE, default=False)
        reference = {"ref_log_prob": _log_probs(_of_this_process["ref"].ref, data)} if wanted else {}
        data.update(reference)
        _fit(self.engine, data)
        output = self.step.add(data, self.worker.loss_fn)
        self.losses += output["loss"]
        for name, value in output["metrics"].items():
            if name in self.metrics:
                self.metrics[name].extend(value)
            else:
                self.metrics[name] = value
        found = self.policy.take()
        if plain is not None:
            refuse_draws(
                self.engine.module, plain, response_from_nested(found["log_probs"], data["response_mask"])
            )
        self.busy += time.perf_counter() - start
        return None if filler or not found else TensorDict({**found, **reference}, batch_size=len(data)).cpu()

    def finish(self) -> dict[str, Any] | None:
        start = time.perf_counter()
        with self._context:
            total = self.step.finish()
            norm = self.engine.optimizer_step()
            rate = self.engine.lr_scheduler_step()
        self.busy += time.perf_counter() - start
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        return {**self._collect(total, norm, rate), "busy": self.busy}

    def _collect(self, total: int, norm: float, rate: float) -> dict[str, Any]:
        """Gather the metrics over the ranks, as verl does after a mini-batch."""
        step, unit = self.step, self.step.divisor.of_metric
        metrics = {name: times(value, 1 / number(step, unit(name))) for name, value in self.metrics.items()}
        group = self.engine.get_data_parallel_group()
        lengths = [self.lengths]
        if group is not None:
            lengths = [[] for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather_object(lengths, self.lengths, group)
        losses = [torch.tensor(loss * step.scale / total) for loss in self.losses]
        output = {"metrics": {**metrics, "grad_norm": norm, "lr": rate}, "loss": losses}
        how = dict(global_token_num=list(chain.from_iterable(lengths)), delta_time=max(self.busy, 1e-9))
        gathered = self.worker._postprocess_output(output, **how, forward_only=False, images_seqlens=None)
        found = tu.get(gathered, "metrics")
        for name, value in found.items():
            if isinstance(value, list) and value:
                of_ranks = isinstance(value[0], Metric)
                found[name] = Metric.aggregate_dp(value) if of_ranks else _flat(value)
        return {**found, "samples_trained": step.samples, "tokens_trained": step.tokens}


def _log_probs(worker: Any, data: TensorDict) -> torch.Tensor:
    """Return the log-probabilities of a round in evaluation, jagged [samples, response], by one of this process's models.

    Not through verl's ``infer_batch`` of the worker, which gives it to the first of several ranks that share a row only."""
    data = data.clone(recurse=False)  # the policy's settings are its own
    tu.assign_non_tensor(data, calculate_entropy=False)
    _fit(worker.engine, data)
    with worker.engine.eval_mode():
        found = worker.engine.infer_batch(data)["model_output"]["log_probs"]
    return response_from_nested(found, data["response_mask"]).cpu()


def _fit(engine: Any, data: TensorDict) -> None:
    """Make one micro-batch of a round, which was packed to the budget already, and `fill` it."""
    tu.assign_non_tensor(
        data, use_dynamic_bsz=False, micro_batch_size_per_gpu=len(data), global_batch_size=len(data)
    )
    fill(engine, data)


def fill(engine: Any, data: TensorDict) -> None:
    """Let verl's training worker add to a batch all that it adds before its engine, policy's or reference's, gets it: such
    as whether the model is to see its rows packed, and computes log-probabilities itself. What is there stays."""
    calls = dict.fromkeys(("train_mode", "eval_mode", "train_batch", "infer_batch"), _nothing)
    nothing = SimpleNamespace(**calls, is_mp_src_rank_with_outputs=lambda: False)
    settings = dict(model_config=engine.model_config, engine_config=engine.engine_config)
    tu.maybe_fix_3d_position_ids(data)  # as train_mini_batch does
    verls = TrainingWorker.infer_batch if engine.engine_config.forward_only else TrainingWorker.train_batch
    verls(SimpleNamespace(engine=nothing, loss_fn=_nothing, **settings), data)


def _nothing(*_: Any, **__: Any) -> Any:
    """Stand in for what an engine does, where only what verl's worker writes into a batch is wanted."""
    return nullcontext()


def _flat(values: list[Any]) -> list[Any]:
    return list(chain.from_iterable(one if isinstance(one, list) else [one] for one in values))
