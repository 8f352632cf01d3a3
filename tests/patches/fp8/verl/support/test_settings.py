"""What stands against carrying kept tokens is refused by name; what they need is set."""

import logging
from typing import Any

import pytest

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches._shared.verl_config import JobConfig
from flashpatch.patches.fp8.verl.correction import truncated_sampling
from flashpatch.patches.fp8.verl.correction.truncated_sampling import CORRECTION, NOTE, ROLLOUT
from flashpatch.patches.fp8.verl.support import settings
from flashpatch.patches.fp8.verl.support.settings import ACTOR, MODEL, MOST, prepare

GOOD = {
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.logprobs_mode": "processed_logprobs",
    f"{ROLLOUT}.calculate_log_probs": True,
    f"{ROLLOUT}.top_k": 20,
    f"{ROLLOUT}.top_p": 0.9,
    f"{ACTOR}.strategy": "fsdp2",
}


class Job(JobConfig):
    """A configuration as a plain mapping."""

    def __init__(self, changes: dict[str, Any]) -> None:
        super().__init__(None, "fp8.verl.validate_config_correction")
        self.values = {**GOOD, **changes}

    def get(self, path: str, default: Any = None) -> Any:
        return self.values.get(path, default)

    def set(self, path: str, value: Any, reason: str = "") -> None:
        self.values[path] = value


@pytest.mark.parametrize(("most", "then"), [(None, 32), (20, 32), (64, 64), (-1, -1)])
def test_vllm_may_return_as_many_log_probabilities(most, then):
    job = Job({MOST: most})
    prepare(job, 32)
    assert job.values[MOST] == then


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (f"{ROLLOUT}.top_k", -1, "bounds the kept tokens"),
        (f"{ROLLOUT}.top_k", 33, "one of 1 to 32"),
        (f"{ROLLOUT}.name", "trtllm", "read from vLLM and SGLang"),
        (f"{ROLLOUT}.logprobs_mode", "raw_logprobs", "processed_logprobs"),
        (f"{ROLLOUT}.calculate_log_probs", False, "True"),
        ("trainer.use_v1", False, "older trainer"),
        ("trainer.v1.trainer_mode", "stream_async", "no field"),
        (f"{ACTOR}.strategy", "megatron", "only FSDP actors"),
        (f"{MODEL}.use_fused_kernels", True, "without logits"),
        (f"{ACTOR}.use_prefix_grouper", True, "by itself"),
        ("distillation.enabled", True, "teacher"),
        (f"{ROLLOUT}.engine_kwargs.vllm.speculative_config", {"method": "eagle"}, "verified drafts"),
        (f"{ROLLOUT}.mtp.enable_rollout", True, "verified drafts"),
    ],
)
def test_what_stands_against_it_is_named(path, value, why):
    job = Job({path: value})
    with pytest.raises(PatchError, match=why) as refused:
        prepare(job, 32)
    assert path in str(refused.value) and "support=0" in str(refused.value)
    assert MOST not in job.values
    prepare(job, 0)  # off, nothing is asked for
    assert MOST not in job.values


SGLANG = {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}
OWN = f"{ROLLOUT}.engine_kwargs.sglang"


def test_of_sglang_nothing_is_to_be_set(monkeypatch):
    monkeypatch.setattr(settings, "version", lambda name: "0.5.21")
    job = Job(SGLANG)
    prepare(job, 32)
    assert job.values == {**GOOD, **SGLANG}


@pytest.mark.parametrize(
    ("changes", "installed", "why"),
    [
        ({}, "0.5.12", r"SGLang 0\.5\.12 \(.*from 0\.5\.21 on"),
        (
            {f"{OWN}.speculative_algorithm": "EAGLE"},
            "0.5.23",
            "speculative_algorithm=EAGLE .*verified drafts",
        ),
        ({f"{OWN}.sampling_mask_max_tokens": 16}, "0.5.23", "sampling_mask_max_tokens=16 .*support=32"),
    ],
)
def test_what_stands_against_it_on_sglang_is_named(monkeypatch, changes, installed, why):
    monkeypatch.setattr(settings, "version", lambda name: installed)
    with pytest.raises(PatchError, match=why):
        prepare(Job({**SGLANG, **changes}), 32)


@pytest.mark.parametrize(("width", "warned"), [(0, True), (32, False)])
def test_nothing_is_warned_of_if_the_trainer_has_the_same_support(caplog, width, warned):
    config = {**GOOD, f"{CORRECTION}.rollout_is": "token"}
    get = lambda path, default=None: config.get(path, default)  # noqa: E731
    truncated_sampling.report(get, width)
    assert any(record.levelno == logging.WARNING for record in caplog.records) == warned
    assert ledger.notes()[NOTE]["measurable"] == warned == truncated_sampling.is_measurable(get, width)
