"""One optimizer step over rounds of a streaming batcher, through an FSDP engine of verl.

While samples still arrive nobody knows how many there will be, so each round adds its *sum* to the gradient,
and the step ends with a division by the number of samples over all rounds and ranks (async-grpo's
``train_grpo.py``). The result is one backward through the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashpatch.patches.grpo.errors import refuse
from flashpatch.patches.grpo.loss.grpo_exact import batch_counts


class StreamedStep:
    """Collects rounds; every rank must take part in every round, with a filler if it has no sample of it.

    Args:
        engine: verl's engine, in its ``train_mode()``, with gradients at zero.
        aggregation: the loss's ``loss_agg_mode``.

    Raises:
        PatchError: an aggregation that divides by nothing, or by a constant: there is nothing to correct.
    """

    def __init__(self, engine: Any, aggregation: str) -> None:
        if aggregation not in ("seq-mean-token-mean", "seq-mean-token-sum", "token-mean"):
            refuse(
                "streaming",
                "aggregation",
                f"is {aggregation!r}.",
                "Use seq-mean-token-mean, seq-mean-token-sum or token-mean; others need no correction.",
            )
        self.engine = engine
        self.rounds = 0
        self.total = 0
        self._unit = "tokens" if aggregation == "token-mean" else "samples"

    def add(self, data: Any, loss: Callable[..., Any]) -> Any:
        """Forward and backward of this rank's share of a round.

        Args:
            data: TensorDict as for ``forward_backward_batch``; a filler's ``response_mask`` is all 0.
            loss: ``(model_output, data, dp_group=None) -> (loss, metrics)``, such as verl's ``ppo_loss``.

        Raises:
            PatchError: nobody counted the round: ``grpo.verl.prepare_micro_batches`` is not live in this process.
        """

        def summed(*args: Any, **kwargs: Any) -> Any:
            mean, metrics = loss(*args, **kwargs)
            return mean * self._count(), metrics

        found = self.engine.forward_backward_batch(data, summed)
        self.rounds += 1
        self.total += self._count()
        return found

    def finish(self) -> int:
        """Divide the gradients; the optimizer may step then. Gives the number they were divided by."""
        for parameter in self.engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(max(self.total, 1))
        return self.total

    def _count(self) -> int:
        counts = batch_counts.last()
        if counts is None:
            refuse(
                "streaming",
                "grpo.verl.prepare_micro_batches",
                "has counted nothing.",
                'Call flashpatch.enable("grpo").',
            )
        return getattr(counts, self._unit)
