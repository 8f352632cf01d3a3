"""Counts that are not of the batch; test_two_ranks.py has the loss's values and gradients."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.verl


def test_wrong_counts_are_loud(monkeypatch):
    import torch

    from flashpatch.errors import PatchError
    from flashpatch.patches.grpo.loss import policy_loss
    from flashpatch.patches.grpo.loss.grpo_exact import Counts

    monkeypatch.setattr(policy_loss.engine, "record_call", lambda patch: None)
    monkeypatch.setattr(policy_loss, "_last", Counts(3, 6))
    config = SimpleNamespace(global_batch_info={"global_batch_size": 8, "batch_num_tokens": 6})
    ones = torch.ones(2, 3)
    with pytest.raises(
        PatchError, match=r"\(8, 6\), and the batch was counted as Counts\(samples=3"
    ) as error:
        policy_loss.policy_loss(ones, ones, ones, ones, "token-mean", config)
    assert error.value.patch == "grpo.verl.register_policy_loss"
    assert "grpo.verl.prepare_micro_batches" in str(error.value)
