"""Truncated sampling: found in the configuration, warned of where ratios are used, and measured."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from flashpatch import ledger
from flashpatch.patches.fp8.mismatch.monitor import Batch, measure, observe
from flashpatch.patches.fp8.verl.correction import mismatch, truncated_sampling
from flashpatch.patches.fp8.verl.correction.truncated_sampling import CORRECTION, NOTE, ROLLOUT

DEFAULTS = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.logprobs_mode": "processed_logprobs"}
DEFAULTS |= {f"{ROLLOUT}.top_p": 1, f"{ROLLOUT}.top_k": -1, f"{ROLLOUT}.val_kwargs.top_p": 1.0}
TIS = {f"{CORRECTION}.rollout_is": "token"}


def reader(changes: dict[str, Any]):
    config = {**DEFAULTS, **changes}
    return lambda path, default=None: config.get(path, default)


def warnings(caplog, changes: dict[str, Any]) -> list[str]:
    caplog.clear()
    truncated_sampling.report(reader(changes))
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.05)])
def test_what_truncates_is_named_with_what_uses_ratios(caplog, name, value):
    [said] = warnings(caplog, {**TIS, f"{ROLLOUT}.{name}": value})
    assert f"{ROLLOUT}.{name}={value}" in said and f"{CORRECTION}.rollout_is=token" in said
    assert "mismatch/kept_mass" in said
    assert ledger.notes()[NOTE]["measurable"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {f"{ROLLOUT}.top_k": 0},
        {f"{ROLLOUT}.top_p": None, f"{ROLLOUT}.top_k": None, f"{ROLLOUT}.min_p": 0.0},
        {f"{ROLLOUT}.val_kwargs.top_p": 0.7, f"{ROLLOUT}.val_kwargs.top_k": 20},
        {f"{ROLLOUT}.temperature": 0.6},
    ],
)
def test_nothing_is_said_of_full_sampling_nor_of_validation(caplog, changes):
    assert warnings(caplog, {**TIS, **changes}) == []
    assert not ledger.notes().get(NOTE, {}).get("measurable")


@pytest.mark.parametrize(
    "changes", [{f"{ROLLOUT}.name": "sglang"}, {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}]
)
def test_logprobs_over_the_vocabulary_have_another_fault_and_no_measure(caplog, changes):
    [said] = warnings(caplog, {**TIS, f"{ROLLOUT}.top_p": 0.9, **changes})
    assert "no ratio knows of the truncation" in said and "cannot be measured" in said
    assert not ledger.notes()[NOTE]["measurable"]


class Drawn:
    """Tokens drawn from truncated policies at many positions, with the exact kept mass.

    ``noise``: standard deviation of what the trainer's logits differ by; 0: equal policies; ``top_p``: mass that truncation
    keeps at least."""

    def __init__(self, noise: float, top_p: float = 0.8, positions: int = 20_000, seed: int = 0) -> None:
        torch = pytest.importorskip("torch")
        random = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(positions, 40, generator=random)
        policy = logits.log_softmax(-1)
        trainer = (logits + noise * torch.randn(logits.shape, generator=random)).log_softmax(-1)
        order = policy.argsort(-1, descending=True)
        before = policy.gather(-1, order).exp().cumsum(-1) - policy.gather(-1, order).exp()
        kept = torch.zeros_like(policy, dtype=torch.bool).scatter(-1, order, before < top_p)
        processed = policy.masked_fill(~kept, -torch.inf).log_softmax(-1)
        tokens = torch.multinomial(processed.exp(), 1, generator=random)
        self.rollout, self.trainer = processed.gather(-1, tokens).T, trainer.gather(-1, tokens).T
        self.mask = torch.ones_like(self.rollout)
        self.kept_mass = (trainer.exp() * kept).sum(-1)


def test_equal_policies_show_the_kept_mass_of_each_position():
    drawn = Drawn(noise=0.0)
    assert (drawn.trainer - drawn.rollout).exp()[0].tolist() == pytest.approx(
        drawn.kept_mass.tolist(), rel=1e-4
    )
    found = measure(drawn.rollout, drawn.trainer, drawn.mask, 2.0, truncated=True)
    assert found["kept_mass"] == pytest.approx(float(drawn.kept_mass.double().mean()), rel=1e-5)
    assert 0.8 < found["kept_mass"] < 0.95 and found["kept_mass_error"] < 1e-3


@pytest.mark.parametrize(("noise", "top_p"), [(0.1, 0.9), (0.5, 0.5), (0.5, 1.0)])
def test_a_rounded_rollout_leaves_the_estimate_at_the_trainers_kept_mass(noise, top_p):
    for seed in range(3):
        drawn = Drawn(noise, top_p, seed=seed)
        found = measure(drawn.rollout, drawn.trainer, drawn.mask, 2.0, truncated=True)
        exact = float(drawn.kept_mass.double().mean())
        assert abs(found["kept_mass"] - exact) < 4 * found["kept_mass_error"] < 0.05


def test_no_measure_without_truncation_and_one_per_precision_with_it():
    drawn = Drawn(0.1, positions=100)
    rows = [tensor.reshape(4, 25) for tensor in (drawn.rollout, drawn.trainer, drawn.mask)]
    batch = Batch(2.0, ["bf16", "int8", "int8", "bf16"])
    assert not [name for name in observe(*rows, batch) if "kept" in name]
    batch = Batch(2.0, batch.precisions, truncated=True)
    found = observe(*rows, batch)
    names = {name.removeprefix("mismatch/") for name in found if "kept" in name}
    assert names == {f"kept_mass{error}{of}" for error in ("", "_error") for of in ("", "/int8", "/bf16")}
    assert ledger.notes()["mismatch"]["int8"]["kept_mass"] == found["mismatch/kept_mass/int8"]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_both_trainers_of_verl_are_measured(monkeypatch, top_p):
    """The newer one through its own configuration; of the older one, this process checked the configuration."""
    omegaconf = pytest.importorskip("omegaconf")
    monkeypatch.setattr(mismatch.engine, "options", lambda family: {"fleet": []})
    drawn = Drawn(0.0, positions=50)
    batch = {"rollout_log_probs": drawn.rollout, "old_log_probs": drawn.trainer, "response_mask": drawn.mask}
    data = SimpleNamespace(batch=batch, non_tensor_batch={})

    def trainer(self, batch) -> dict[str, float]:
        return mismatch.calculate_debug_metrics(lambda data: {}, data)

    values = {**DEFAULTS, f"{ROLLOUT}.top_p": top_p}
    config = omegaconf.OmegaConf.create()
    for path, value in values.items():
        omegaconf.OmegaConf.update(config, path, value, force_add=True)
    truncated_sampling.report(reader({}))
    newer = mismatch.compute_old_log_prob(trainer, SimpleNamespace(config=config), SimpleNamespace(tags=[{}]))
    truncated_sampling.report(reader(values))
    older = mismatch.calculate_debug_metrics(lambda data: {}, data)
    truncated_sampling.report(reader({}))
    assert ("mismatch/kept_mass" in newer) == ("mismatch/kept_mass" in older) == (top_p < 1)
