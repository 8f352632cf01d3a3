"""A plain ``transformers.Trainer`` logs the rollouts' numbers wherever it logs its own."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trainer("accelerate"), pytest.mark.full]


def trained(folder: Path, callbacks: tuple[Any, ...] = (), first: bool = True) -> Any:
    """A trainer of two steps, with a sync and a batch of rollouts before each of its logs."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from flashpatch.patches.fp8.rollout_numbers import NUMBERS
    from flashpatch.patches.fp8.transformers import RolloutMetrics

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 1)

        def forward(self, x: Any) -> dict[str, Any]:
            return dict(loss=self.line(x).pow(2).mean())

    class Rollouts(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            NUMBERS.add({"mismatch/k3": state.global_step + 1, "sync/policy_version": state.global_step})

    class Recorder(TrainerCallback):
        def __init__(self) -> None:
            self.logs: list[dict[str, float]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self.logs.append(dict(logs))

    recorder = Recorder()
    trainer = Trainer(
        model=Model(),
        args=TrainingArguments(
            str(folder), max_steps=2, logging_steps=1, report_to="none", use_cpu=True, save_strategy="no"
        ),
        train_dataset=[dict(x=torch.ones(2))] * 4,
        callbacks=[recorder, Rollouts(), *callbacks],
    )
    if first:
        RolloutMetrics().add_to(trainer)
        RolloutMetrics().add_to(trainer)
    trainer.train()
    return trainer, recorder


def test_each_step_has_its_numbers_in_trackers_and_history(tmp_path: Path) -> None:
    from flashpatch.patches.fp8.transformers import RolloutMetrics

    trainer, recorder = trained(tmp_path)
    assert sum(isinstance(one, RolloutMetrics) for one in trainer.callback_handler.callbacks) == 1
    steps = [logs for logs in recorder.logs if "loss" in logs]
    assert [logs["mismatch/k3"] for logs in steps] == [1, 2]
    assert [logs["sync/policy_version"] for logs in steps] == [0, 1]
    assert [row["mismatch/k3"] for row in trainer.state.log_history if "loss" in row] == [1, 2]


def test_without_it_nothing_is_added_and_an_evaluation_stays_as_it_is(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from flashpatch.patches.fp8.rollout_numbers import NUMBERS
    from flashpatch.patches.fp8.transformers import RolloutMetrics

    _, recorder = trained(tmp_path, first=False)
    assert not any("mismatch/k3" in logs for logs in recorder.logs)
    logs = dict(eval_loss=1.0)
    state = SimpleNamespace(is_world_process_zero=True, log_history=[], global_step=1)
    RolloutMetrics().on_log(None, state, None, logs=logs)
    assert logs == dict(eval_loss=1.0) and NUMBERS.take()


def test_one_that_was_passed_to_the_trainer_moves_to_the_front(tmp_path: Path) -> None:
    from flashpatch.patches.fp8.transformers import RolloutMetrics

    mine = RolloutMetrics()
    trainer, recorder = trained(tmp_path, callbacks=(mine,))
    assert trainer.callback_handler.callbacks[0] is mine
    assert [logs["mismatch/k3"] for logs in recorder.logs if "loss" in logs] == [1, 2]
