"""What is measured of a batch of TRL's, by hand."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashpatch import ledger
from flashpatch.patches.fp8 import trl

SETTINGS = dict(top_p=1.0, top_k=0, min_p=None)


def _measured(trainer: Any, given: dict[str, Any]) -> dict[str, float]:
    return trl._measured(trainer, given)


def trainer(**settings: Any) -> SimpleNamespace:
    fixed = dict(
        vllm_importance_sampling_clip_max=3.0, vllm_importance_sampling_mode="sequence_mask", **SETTINGS
    )
    return SimpleNamespace(**{**fixed, **settings})


def batch(gaps: list[list[float]], **more: Any) -> dict[str, Any]:
    """Two samples of two tokens, of which the trainer's logprobs are higher by ``gaps``."""
    rollout = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    own = rollout + torch.tensor(gaps)
    return dict(
        sampling_per_token_logps=rollout,
        old_per_token_logps=own,
        completion_mask=torch.ones(2, 2, dtype=torch.long),
        **more,
    )


@pytest.fixture(autouse=True)
def fresh() -> None:
    ledger.note(little_weight=None)


def test_tokens_of_tools_and_tokens_without_a_logprob_are_not_measured() -> None:
    given = batch([[0.0, 5.0], [0.0, 0.0]], tool_mask=torch.tensor([[1, 0], [1, 1]]))
    given["sampling_per_token_logps"][1, 1] = float("nan")
    found = _measured(trainer(), given)
    assert found["mismatch/tokens"] == 2 and found["mismatch/k3"] == 0
    given = batch([[0.0, 0.0], [0.0, 0.0]])
    del given["old_per_token_logps"]
    assert _measured(trainer(), given) == {}


@pytest.mark.parametrize("settings", [dict(top_p=0.9), dict(top_k=5), dict(min_p=0.1)])
def test_truncated_sampling_is_measured(settings: dict[str, float]) -> None:
    found = _measured(trainer(**settings), batch([[0.0, 0.0], [0.0, 0.0]]))
    assert found["mismatch/kept_mass"] == 1
    assert "mismatch/kept_mass" not in _measured(trainer(), batch([[0.0, 0.0], [0.0, 0.0]]))


def test_ratios_that_leave_little_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    ratio = torch.tensor([[0.0], [0.5]])
    with caplog.at_level(logging.WARNING, logger="flashpatch.fp8"):
        for _ in range(2):
            given = batch([[0.0, 0.0], [0.0, 0.0]], importance_sampling_ratio=ratio)
            found = _measured(trainer(), given)
    assert found["mismatch/weight_mean"] == 0.25 and found["mismatch/weight_dropped"] == 0.5
    [message] = [record.getMessage() for record in caplog.records]
    assert "0.25 of their weight" in message and "drop 50% of sequences" in message


def test_ratios_of_tokens_count_where_the_mask_does(caplog: pytest.LogCaptureFixture) -> None:
    ratio = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    given = batch([[0.0, 0.0], [0.0, 0.0]], importance_sampling_ratio=ratio)
    given["completion_mask"][0, 1] = 0
    found = _measured(trainer(vllm_importance_sampling_mode="token_mask"), given)
    assert found["mismatch/weight_mean"] == 1 and found["mismatch/weight_dropped"] == 0
    assert not caplog.records
