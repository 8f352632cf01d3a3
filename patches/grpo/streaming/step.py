"""Run one optimizer step over rounds that come one after the other, through an FSDP engine of verl.

While samples still arrive their number is unknown, so each round adds its *sum* to the gradient, and the step ends
with a division by the number of samples, or tokens, over all rounds and ranks (async-grpo's ``train_grpo.py``). The
result is one backward through the whole batch.

Between two optimizer steps the policy does not change, and all rounds of a step lie between two. verl's
``old_log_probs`` are then what the training forward computes anyway, unless the model draws random numbers (`refuse_draws`): the
forward that verl runs for them before each step is saved. What depends on them (importance weights and rejection, ``algorithm.rollout_correction``) is computed in
the loss, by verl's own function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.loss import policy_loss
from flashpatch.patches.grpo.streaming.divisor import Divisor


class StreamedStep:
    """Collect rounds; every rank must take part in every round, with a filler if it has no sample.

    Args:
        engine: verl's engine, in its ``train_mode()``, with gradients at zero.
        divisor: what the loss divides by, see `flashpatch.patches.grpo.streaming.divisor`.
        before: called with a micro-batch's model output and its data before the loss, which sees what it changes;
            samples whose ``response_mask`` it sets to 0 are not counted.
        expected: samples of all rounds, about: each loss is divided by as many first, lest its sum overflows 16 bits.

    Attributes:
        scale: what their losses were divided by, a power of two, the same in all rounds and on all ranks.
        samples, tokens: counted in the loss's mask, of this rank until `finish`, of all afterwards."""

    def __init__(self, engine: Any, divisor: Divisor, before: Any = None, expected: int = 1) -> None:
        self.engine, self.divisor = engine, divisor
        self._before, self._expected = before, expected
        self.samples = self.tokens = self.scale = 0

    def add(self, data: Any, loss: Callable[..., Any]) -> Any:
        """Run forward and backward for this rank's share of a round.

        Args:
            data: TensorDict as for ``forward_backward_batch``; a filler's ``response_mask`` is all 0.
            loss: called with ``model_output``, ``data`` and ``dp_group``, returns loss and metrics; such as verl's
                ``ppo_loss``.

        Returns:
            what ``forward_backward_batch`` returns; losses are divided by ``scale``, metrics that are sums by nothing yet.

        Raises:
            PatchError: the round was not counted: ``grpo.verl.prepare_micro_batches`` is not live here."""

        from flashpatch.patches.grpo.loss.grpo_exact import count

        def summed(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            if self._before is not None:
                self._before(model_output, data)
            mean, metrics = loss(model_output=model_output, data=data, dp_group=dp_group)
            here = count(data["response_mask"])  # the mask that the loss used
            self.samples, self.tokens = self.samples + here.samples, self.tokens + here.tokens
            round_ = self._counts_of_round()
            sums = {
                name: times(metric, number(round_, self.divisor.of_metric(name)))
                for name, metric in metrics.items()
            }
            return mean * (number(round_, self.divisor.loss) / self._scale(round_)), sums

        return self.engine.forward_backward_batch(data, summed)

    def finish(self) -> int:
        """Divide the gradients by the count over all ranks, after which the optimizer may step; return that count."""
        import torch

        totals = torch.tensor([self.samples, self.tokens])
        group = self.engine.get_data_parallel_group()
        if group is not None:
            totals = totals.to(next(self.engine.module.parameters()).device)
            torch.distributed.all_reduce(totals, group=group)
        self.samples, self.tokens = totals.tolist()
        total = number(self, self.divisor.loss)
        for parameter in self.engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(total / self.scale)
        return total

    def _scale(self, counts: Any) -> int:
        """Return `scale`, by the first round's tokens per sample if the loss divides by tokens."""
        expected = self._expected * number(counts, self.divisor.loss) // number(counts, "samples")
        self.scale = self.scale or 1 << max(expected if self.divisor.loss else 1, 1).bit_length() - 1
        return self.scale

    def _counts_of_round(self) -> Any:
        """Return the samples and tokens that the losses of this round were divided by."""
        counts = policy_loss.last()
        if counts is None:
            raise PatchError(
                "has counted nothing.",
                **policy_loss.patches.at(policy_loss.prepare_micro_batches),
                advice='Call flashpatch.enable("grpo").',
            )
        return counts


def refuse_draws(model: Any, plain: Any, trained: Any) -> None:
    """Raise PatchError if a model's log-probabilities are others in training than in evaluation, as dropout and router noise make
    them. Both are jagged [samples, response], in nats."""
    if (off := (trained.values().cpu() - plain.values()).abs().mean()) > 0.02:  # rounding is far less
        raise PatchError(
            f"{type(model).__name__} draws random numbers in training (dropout, router noise): its log-probabilities there are "
            f"{off:.2g} nats from verl's old_log_probs, on average.",
            **policy_loss.patches.at(policy_loss.prepare_micro_batches),
            advice="Set the model's rates to 0 below actor_rollout_ref.model.override_config, such as +attention_dropout=0, or "
            "trainer.v1.trainer_mode=separate_async.",
        )


def number(counts: Any, unit: str) -> int:
    """Return the samples or tokens of ``counts``, at least 1; 1 for the unit ""."""
    return max(getattr(counts, unit), 1) if unit else 1


def times(metric: Any, factor: float) -> Any:
    """Multiply a metric that verl adds up over micro-batches, such as the loss; others stay as they are."""
    from verl.utils.metric import AggregationType, Metric

    if not (isinstance(metric, Metric) and metric.aggregation is AggregationType.SUM):
        return metric
    product = metric.init_list()
    product.extend([value * factor for value in metric.values])
    return product


class CurrentPolicy:
    """Complete a micro-batch before its loss, and keep what the forward found.

    Args:
        correction: verl's ``algorithm.rollout_correction`` as a mapping; None for no correction.
        entropy_gradient: whether the loss has an entropy term; without it no gradient goes through the entropy."""

    def __init__(self, correction: dict[str, Any] | None, entropy_gradient: bool) -> None:
        self.correction = correction
        self.entropy_gradient = entropy_gradient
        self.found: list[dict[str, Any]] = []

    def __call__(self, model_output: dict[str, Any], data: Any) -> None:
        """Set ``old_log_probs``, and with a correction ``rollout_is_weights`` and ``response_mask``.

        Args:
            model_output: ``log_probs`` and ``entropy``, jagged [samples, prompt and response].
            data: the micro-batch; ``response_mask`` and ``rollout_log_probs``, jagged [samples, response]."""
        from verl.workers.utils.padding import response_from_nested

        kept = {
            name: model_output[name].detach() for name in ("log_probs", "entropy") if name in model_output
        }
        if "entropy" in kept and not self.entropy_gradient:
            model_output["entropy"] = kept["entropy"]
        self.found.append(kept)
        data["old_log_probs"] = response_from_nested(kept["log_probs"], data["response_mask"])
        if self.correction and "rollout_log_probs" in data:
            self._correct(data)

    def take(self) -> dict[str, Any]:
        """Return what the micro-batches since the last call found, in their order, and forget it."""
        import torch

        found, self.found = self.found, []
        return {
            name: torch.nested.as_nested_tensor(
                [row for one in found for row in one[name].unbind()], layout=torch.jagged
            )
            for name in (found[0] if found else ())
        }

    def _correct(self, data: Any) -> None:
        """Correct each row by itself. One more, of the ratio 1, is for verl's metrics, which fail where nothing is left."""
        import torch
        from tensordict import TensorDict
        from verl.protocol import DataProto
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
        from verl.workers.utils.padding import response_to_nested

        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        rows = data.select(*names).to_padded_tensor()
        more = {
            name: torch.nn.functional.pad(rows[name], (0, 0, 0, 1), value=name == "response_mask")
            for name in names
        }
        padded = DataProto(batch=TensorDict(more, batch_size=len(rows) + 1))
        padded, _ = compute_rollout_correction_and_add_to_batch(padded, self.correction)
        outputs = data["response_mask"]
        for name in ("rollout_is_weights", "response_mask"):
            if name in padded.batch:
                data[name] = response_to_nested(padded.batch[name][:-1], outputs)
