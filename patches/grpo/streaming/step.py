"""Run one optimizer step over rounds that come one after the other, through an FSDP engine of verl.

While samples still arrive their number is unknown, so each round adds its *sum* to the gradient, and the step ends
with a division by the number of samples, or tokens, over all rounds and ranks (async-grpo's ``train_grpo.py``). The
result is one backward through the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashpatch.patches.grpo.errors import refuse
from flashpatch.patches.grpo.loss import batch_counts
from flashpatch.patches.grpo.streaming.divisor import Divisor


class StreamedStep:
    """Collect rounds; every rank must take part in every round, with a filler if it has no sample.

    Args:
        engine: verl's engine, in its ``train_mode()``, with gradients at zero.
        divisor: what the loss divides by, see `flashpatch.patches.grpo.streaming.divisor`.
        before: called with a micro-batch's model output and its data before the loss, which sees what it changes;
            samples whose ``response_mask`` it sets to 0 are not counted.

    Attributes:
        rounds: rounds that were added.
        samples, tokens: counted in the loss's mask, of this rank until `finish`, of all afterwards.
    """

    def __init__(
        self, engine: Any, divisor: Divisor, before: Callable[[dict[str, Any], Any], None] | None = None
    ) -> None:
        self.engine = engine
        self.divisor = divisor
        self.rounds = self.samples = self.tokens = 0
        self._before = before

    def add(self, data: Any, loss: Callable[..., Any]) -> Any:
        """Run forward and backward for this rank's share of a round.

        Args:
            data: TensorDict as for ``forward_backward_batch``; a filler's ``response_mask`` is all 0.
            loss: called with ``model_output``, ``data`` and ``dp_group``, returns loss and metrics; such as verl's
                ``ppo_loss``.

        Returns:
            what ``forward_backward_batch`` returns; losses, and metrics that are sums, are not divided yet.

        Raises:
            PatchError: the round was not counted: ``grpo.verl.prepare_micro_batches`` is not live here.
        """

        def summed(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            if self._before is not None:
                self._before(model_output, data)
            mean, metrics = loss(model_output=model_output, data=data, dp_group=dp_group)
            self._count(data["response_mask"])
            round_ = self._counts_of_round()
            sums = {
                name: times(metric, number(round_, self.divisor.of_metric(name)))
                for name, metric in metrics.items()
            }
            return mean * number(round_, self.divisor.loss), sums

        found = self.engine.forward_backward_batch(data, summed)
        self.rounds += 1
        return found

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
                parameter.grad.div_(total)
        return total

    def _count(self, mask: Any) -> None:
        """Add this rank's samples and tokens of one micro-batch, from the mask that the loss used."""
        outputs = mask.offsets().diff() if mask.is_nested else None
        values = mask.values() if mask.is_nested else mask
        kept = values != 0
        self.tokens += int(kept.sum())
        if outputs is None:
            self.samples += int(kept.any(-1).sum())
        else:
            self.samples += sum(bool(part.any()) for part in kept.split(outputs.tolist()))

    def _counts_of_round(self) -> Any:
        """Return the samples and tokens that the losses of this round were divided by."""
        counts = batch_counts.last()
        if counts is None:
            refuse(
                "streaming",
                "grpo.verl.prepare_micro_batches",
                "has counted nothing.",
                'Call flashpatch.enable("grpo").',
            )
        return counts


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
