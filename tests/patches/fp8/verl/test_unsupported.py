"""Settings of SGLang rollouts that are refused by name before anything starts, read from the recipe alone."""

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl import verl_config

ROLLOUT, MODEL = verl_config.ROLLOUT, verl_config.MODEL
PLAIN = {
    f"{ROLLOUT}.name": "sglang",
    f"{ROLLOUT}.data_parallel_size": 1,
    f"{ROLLOUT}.disaggregation.enabled": False,
    f"{ROLLOUT}.checkpoint_engine.backend": "naive",
    f"{MODEL}.lora_rank": 0,
}
REFUSED = [
    (f"{ROLLOUT}.data_parallel_size", 2),
    (f"{ROLLOUT}.disaggregation.enabled", True),
    (f"{ROLLOUT}.checkpoint_engine.backend", "delta_sharded"),
]


def reader(**changes):
    settings = {**PLAIN, **changes}
    return lambda path, default=None: settings.get(path, default)


@pytest.mark.parametrize("path, value", REFUSED)
def test_what_an_update_cannot_follow_is_refused_by_name(path, value):
    (refusal,) = verl_config.refusals(reader(**{path: value}))
    assert refusal.startswith(f"{path}={value} (")
    assert not list(verl_config.refusals(reader(**{path: value, f"{ROLLOUT}.name": "vllm"})))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_quantization_aware_training_is_refused_on_each_engine(engine):
    (refusal,) = verl_config.refusals(reader(**{f"{ROLLOUT}.qat.enable": True, f"{ROLLOUT}.name": engine}))
    assert refusal.startswith(f"{ROLLOUT}.qat.enable=True (verl writes NVFP4 weights")


@pytest.mark.parametrize(
    ("version", "backend", "says"),
    [
        ("0.5.23", "naive", []),
        ("0.5.12", "naive", ["verl's adapters are followed from SGLang 0.5.21 on"]),
        ("0.5.20", "naive", ["verl's adapters are followed from SGLang 0.5.21 on"]),
        ("0.5.23", "gloo", ["never travelled to SGLang through"]),
    ],
)
def test_adapters_reach_sglang_from_the_version_on_that_takes_verls_request(
    monkeypatch, version, backend, says
):
    monkeypatch.setattr(verl_config.metadata, "version", lambda name: version)
    settings = {f"{MODEL}.lora_rank": 8, f"{ROLLOUT}.checkpoint_engine.backend": backend}
    found = list(verl_config.refusals(reader(**settings)))
    assert len(found) == len(says) and all(one in text for one, text in zip(says, found))


def test_all_are_in_one_error_and_verl_is_not_called(monkeypatch):
    asked = []
    monkeypatch.setattr(
        verl_config.JobConfig, "get", lambda self, path, default=None: self.config.get(path, default)
    )
    with pytest.raises(PatchError) as caught:
        verl_config.validate_config_rollout(asked.append, {**PLAIN, **dict(REFUSED)})
    assert not asked and all(path in str(caught.value) for path, _ in REFUSED)
    config = dict(PLAIN)
    verl_config.validate_config_rollout(asked.append, config)
    assert asked == [config]


@pytest.mark.parametrize(
    "path, value",
    [
        (f"{ROLLOUT}.checkpoint_engine.backend", "naive"),
        (f"{ROLLOUT}.checkpoint_engine.backend", "delta_sharded"),
        (f"{ROLLOUT}.checkpoint_engine.backend", "mooncake"),
        (f"{ROLLOUT}.checkpoint_engine.backend", "kimi_ckpt_engine"),
        (f"{MODEL}.lora_rank", 8),
        (f"{MODEL}.lora.rank", 8),
    ],
)
def test_what_sends_no_differences_is_refused_by_name(path, value):
    settings = {f"{ROLLOUT}.checkpoint_engine.backend": "nccl", path: value}
    (refusal,) = verl_config.without_differences(reader(**settings))
    assert refusal.startswith(f"{path}={value} (")


def test_they_are_refused_after_other_families_have_chosen(monkeypatch):
    monkeypatch.setattr(verl_config.delta_sync, "is_on", lambda: True)
    config = {f"{ROLLOUT}.checkpoint_engine.backend": "naive"}

    def chooses(config):
        config[f"{ROLLOUT}.checkpoint_engine.backend"] = "gloo"

    monkeypatch.setattr(
        verl_config.JobConfig, "get", lambda self, path, default=None: self.config.get(path, default)
    )
    verl_config.validate_config_rollout(chooses, config)
    with pytest.raises(PatchError, match="delta_sync does not go with .*backend=naive"):
        verl_config.validate_config_rollout(
            lambda config: None, {f"{ROLLOUT}.checkpoint_engine.backend": "naive"}
        )
