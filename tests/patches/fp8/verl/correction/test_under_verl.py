"""Correction and monitor on verl's own recipe, batch and functions; no Ray, no engine."""

import textwrap
from pathlib import Path

import cpu_lab
import pytest
import warm

pytestmark = pytest.mark.verl

PREPARED = """
import json, pathlib, sys
import hydra, numpy, torch
from hydra import compose, initialize_config_dir
import verl, verl.utils.config
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as correct
from verl.utils.debug import metrics as debug
def recipe(*overrides):
    where = str(pathlib.Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(where, version_base=None):
        return compose("ppo_trainer", [
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4", "algorithm.adv_estimator=grpo",
            "trainer.n_gpus_per_node=1", "actor_rollout_ref.model.path=/nowhere", *overrides])
def validated(*overrides):
    config = recipe(*overrides)
    verl.utils.config.validate_config(config, use_reference_policy=False, use_critic=False)
    return config
def batch():
    noise = torch.Generator().manual_seed(0)
    rollout = -torch.rand(4, 50, generator=noise)
    gap = torch.tensor([0.0, 0.0, 0.6, 0.6])[:, None] * torch.randn(4, 50, generator=noise)
    return DataProto.from_dict(
        tensors=dict(rollout_log_probs=rollout, old_log_probs=rollout + gap, response_mask=torch.ones(4, 50),
                     responses=torch.zeros(4, 50, dtype=torch.long)),
        non_tensors=dict(rollout_precision=numpy.array(["bf16", "bf16", "int8", "int8"], dtype=object)))
"""


def scenario(code: str, folder: Path, names: str) -> str:
    code = PREPARED + textwrap.dedent(code)
    done = cpu_lab.checked(code, folder, imported=warm.VERL_VLLM, FLASHPATCH=names)
    return done.stdout + done.stderr


def test_quantized_rollouts_are_corrected_and_measured(tmp_path):
    said = scenario(
        """
        from flashpatch import engine, ledger
        from flashpatch.patches.fp8.verl.correction.mismatch import compute_old_log_prob
        config = validated()
        correction = config.algorithm.rollout_correction
        assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 2.0), correction
        assert ledger.notes()["tis"] == {"on": True, "why": "rollouts are quantized, and the config sets no correction",
                                         "cap": 2.0, "rollouts": ["int8"]}
        held, _ = correct(batch(), correction)
        weights = held.batch["rollout_is_weights"]
        assert weights.max() == 2.0 and (weights[:2] == 1).all() and weights[2:].std() > 0.1
        chosen = validated("algorithm.rollout_correction.rollout_is=sequence")
        assert chosen.algorithm.rollout_correction.rollout_is == "sequence"
        assert "sets algorithm.rollout_correction.rollout_is" in ledger.notes()["tis"]["why"]
        assert engine.statuses()["fp8.verl.validate_config_logprobs"].state.word == "superseded"
        assert "processed_logprobs" in engine.statuses()["fp8.verl.validate_config_logprobs"].state.detail
        found = debug.calculate_debug_metrics(batch())
        assert found["training/rollout_probs_diff_valid"] == 1
        assert found["mismatch/k3/bf16"] < 1e-9 < 0.05 < found["mismatch/k3/int8"], found
        assert found["mismatch/clip_fraction/int8"] > 0.05 and found["mismatch/tokens"] == 200
        assert engine.statuses()["fp8.verl.calculate_debug_metrics"].calls == 1
        assert "mismatch/kept_mass" not in found
        validated("actor_rollout_ref.rollout.val_kwargs.top_p=0.7")
        assert "truncated_sampling" not in ledger.notes()
        validated("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_k=50")
        assert ledger.notes()["truncated_sampling"]["measurable"]
        found = debug.calculate_debug_metrics(batch())
        assert found["mismatch/kept_mass"] == found["mismatch/ratio_mean"] and found["mismatch/kept_mass_error"] > 0
        """,
        tmp_path,
        "cpu,int8",
    )
    assert "rollout_correction.rollout_is=token: truncated importance sampling with cap 2" in said
    assert "tis='off'" in said
    assert (
        "truncated sampling (actor_rollout_ref.rollout.top_p=0.9, actor_rollout_ref.rollout.top_k=50) meets importance "
        "ratios (algorithm.rollout_correction.rollout_is=token)" in said
    )
    assert "top_p=0.7" not in said
