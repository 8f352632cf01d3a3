"""Let a trainer built on Transformers' ``Trainer`` log the numbers of its rollouts wherever it logs its own.

>>> from flashpatch.patches.fp8.transformers import RolloutMetrics
>>> RolloutMetrics().add_to(trainer)"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from flashpatch.patches._shared import step_metrics
from flashpatch.patches.fp8.rollout_numbers import NUMBERS, of_engines

if TYPE_CHECKING:
    from transformers import Trainer


class RolloutMetrics(TrainerCallback):
    """Add the rollouts' numbers to what a ``transformers.Trainer`` logs while it trains.

    They reach each tracker in ``report_to``, other callbacks and ``trainer.state.log_history``, and with the rest of what
    is logged the ledger, so that ``flashpatch report`` shows them. Names are those under verl: ``sync/*``,
    ``timing_s/sync/*`` and ``mismatch/*``.

    TRL's trainers get one by themselves while ``fp8``, ``int8`` or ``bf16`` is on. Other trainers call `add_to`: a callback
    that is passed as ``callbacks=[RolloutMetrics()]`` comes after the trackers, which would not see its numbers."""

    def add_to(self, trainer: Trainer) -> RolloutMetrics:
        """Put this callback before all others of ``trainer``, unless it has one already; return the one it has."""
        callbacks = trainer.callback_handler.callbacks
        there = next((one for one in callbacks if isinstance(one, RolloutMetrics)), self)
        if there in callbacks:
            callbacks.remove(there)
        callbacks.insert(0, there)
        return there

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Add the numbers to ``logs``, in place; logs of an evaluation stay as they are."""
        if logs is None or not state.is_world_process_zero or any(name.startswith("eval_") for name in logs):
            return
        added = {**of_engines(), **NUMBERS.take()}
        logs.update(added)
        if state.log_history and added:
            state.log_history[-1].update(added)
        step_metrics.record(logs, state.global_step)
