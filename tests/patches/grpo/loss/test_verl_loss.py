"""The registered loss beside verl's own; the family's probe has gradients through FSDP on two ranks."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.verl


def test_the_registered_loss_is_verls_where_the_counts_agree(scenario):
    scenario("""
        import torch
        from types import SimpleNamespace
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.workers.config import FSDPActorConfig
        from flashpatch.patches.grpo.loss import policy_loss as counting
        from flashpatch.patches.grpo.loss.grpo_exact import count
        torch.manual_seed(0)
        new = (-torch.rand(4, 7)).requires_grad_()
        old = new.detach() + torch.randn(4, 7)
        gain, weights = torch.randn(4, 1).expand(4, 7), torch.rand(4, 7)
        mask = (torch.arange(7) < torch.tensor([[3], [7], [1], [5]])).bool()
        counting._last = count(mask)
        from flashpatch.patches.grpo.loss.grpo_exact import AGGREGATIONS
        for mode in AGGREGATIONS:
            for extra in ({}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}):
                config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, **extra)
                config.global_batch_info.update(dp_size=2, batch_num_tokens=16, global_batch_size=4)
                config.global_batch_info["loss_scale_factor"] = 9
                both = []
                for name in ("vanilla", "grpo_exact"):
                    loss, metrics = get_policy_loss_fn(name)(
                        old_log_prob=old, log_prob=new, advantages=gain, response_mask=mask,
                        loss_agg_mode=mode, config=config, rollout_is_weights=weights)
                    both.append((loss, torch.autograd.grad(loss, new)[0], metrics))
                torch.testing.assert_close(both[0][:2], both[1][:2])
                for key in ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"):
                    assert abs(both[0][2][key] - both[1][2][key]) < 1e-5, key
                assert both[1][2]["actor/samples"] == 4
    """)


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
