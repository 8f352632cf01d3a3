"""What a recipe may ask for, read from the recipe alone: neither verl nor torch is needed."""

from types import SimpleNamespace

import pytest

from flashpatch.patches.cpu import verl_config

ROLLOUT = "actor_rollout_ref.rollout"
PLAIN = {
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 2,
    "trainer.nnodes": 1,
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.model.lora_rank": 0,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.free_cache_engine": True,
    f"{ROLLOUT}.quantization": None,
    "ray_kwargs.ray_init.address": "auto",
}


def reader(**changes):
    settings = {**PLAIN, **changes}
    return lambda path, default=None: settings.get(path, default)


@pytest.mark.parametrize(
    "path, value",
    [
        ("critic.model.lora_rank", 8),
        ("critic.model.lora.rank", 8),
        ("critic.model.lora_adapter_path", "adapters"),
        ("actor_rollout_ref.actor.strategy", "megatron"),
        ("critic.strategy", "torchtitan"),
        (f"{ROLLOUT}.name", "trtllm"),
        (f"{ROLLOUT}.quantization", "fp8"),
        (f"{ROLLOUT}.checkpoint_engine.backend", "nccl"),
        (f"{ROLLOUT}.checkpoint_engine.backend", "mooncake"),
        ("async_training.use_dynamic_resource_scheduling", True),
    ],
)
def test_what_does_not_run_is_refused_by_name(path, value):
    (refusal,) = verl_config.refusals(reader(**{path: value}))
    assert refusal.startswith(f"{path}={value} (")


@pytest.mark.parametrize("name", verl_config.ADAPTERS)
def test_adapters_of_the_actor_run_and_those_from_a_path_on_vllm(name):
    asked, sglang = {f"{verl_config.MODEL}.{name}": 8}, {f"{ROLLOUT}.name": "sglang"}
    assert not list(verl_config.refusals(reader(**asked)))
    refused = [f"{verl_config.MODEL}.{name}=8"] if name == "lora_adapter_path" else []
    assert [one.split()[0] for one in verl_config.refusals(reader(**asked, **sglang))] == refused
    merged = {f"{model}.lora.merge": True for model in (verl_config.MODEL, "critic.model")}
    assert not list(verl_config.refusals(reader(**merged, **{f"{verl_config.MODEL}.{name}": 8})))
    (refusal,) = verl_config.refusals(reader(**merged, **{f"critic.model.{name}": 8}))
    assert refusal.startswith(f"critic.model.{name}=8 (never run")


def test_adapters_under_fsdp1_are_refused_on_several_ranks():
    """The reader's plain job has two ranks."""
    adapters = {f"{verl_config.MODEL}.lora_rank": 8, "actor_rollout_ref.actor.strategy": "fsdp"}
    (refusal,) = verl_config.refusals(reader(**adapters))
    assert "lora_rank=8 with actor_rollout_ref.actor.strategy=fsdp on several ranks" in refusal
    for other in ({"actor_rollout_ref.actor.strategy": "fsdp2"}, {"trainer.n_gpus_per_node": 1}):
        assert not list(verl_config.refusals(reader(**{**adapters, **other})))


@pytest.mark.parametrize("part", ["actor", "ref.fsdp_config"])
def test_ulysses_is_refused_beside_an_attention_that_it_does_not_cover(part):
    path = f"actor_rollout_ref.{part}.ulysses_sequence_parallel_size"
    assert not list(verl_config.refusals(reader(**{path: 2})))
    assert not list(verl_config.refusals(reader(**{path: 2, verl_config.ATTENTION: "sdpa"})))
    (refusal,) = verl_config.refusals(reader(**{path: 2, verl_config.ATTENTION: "eager"}))
    assert refusal.startswith(f"{path}=2 with {verl_config.ATTENTION}=eager (")


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.v1.trainer_mode": "colocate_async"},
        {"trainer.v1.trainer_mode": "separate_async"},
        {f"{ROLLOUT}.checkpoint_engine.backend": "gloo"},
        {"trainer.v1.trainer_mode": "separate_async", "trainer.use_v1": False},
        {
            f"{ROLLOUT}.checkpoint_engine.backend": "mine",
            f"{ROLLOUT}.checkpoint_engine.custom_backend_module": "mine",
        },
    ],
)
def test_other_asynchronous_settings_are_not(changes):
    assert list(verl_config.refusals(reader(**changes))) == []


def test_a_plain_recipe_goes_without_sleep_mode_and_flash_attention_if_no_other_was_chosen():
    assert list(verl_config.refusals(reader())) == []
    assert dict(verl_config.adaptations(reader())) == {
        f"{ROLLOUT}.free_cache_engine": False,
        f"{ROLLOUT}.enable_sleep_mode": False,
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    }
    chosen = reader(**{"actor_rollout_ref.model.override_config.attn_implementation": "eager"})
    assert "sdpa" not in dict(verl_config.adaptations(chosen)).values()


def test_slots_are_only_given_to_a_ray_of_our_own(monkeypatch):
    monkeypatch.setattr(verl_config, "_starts_ray", lambda get: True)
    changed = dict(verl_config.adaptations(reader()))
    assert changed["ray_kwargs.ray_init.num_gpus"] == 2 and changed["ray_kwargs.ray_init.num_cpus"] >= 24
    counted = reader(**{"ray_kwargs.ray_init.num_gpus": 4, "ray_kwargs.ray_init.num_cpus": 8})
    assert not [path for path, _ in verl_config.adaptations(counted) if path.startswith("ray_kwargs")]


ENGINE = f"{ROLLOUT}.checkpoint_engine"
BACKEND, MODULE = f"{ENGINE}.backend", f"{ENGINE}.custom_backend_module"
SEPARATE = {
    "trainer.v1.trainer_mode": "separate_async",
    f"{ROLLOUT}.nnodes": 1,
    f"{ROLLOUT}.n_gpus_per_node": 3,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (SEPARATE, {BACKEND: "gloo", MODULE: verl_config.GLOO_MODULE}),
        (SEPARATE | {BACKEND: "naive"}, {BACKEND: "gloo", MODULE: verl_config.GLOO_MODULE}),
        (SEPARATE | {BACKEND: "gloo"}, {MODULE: verl_config.GLOO_MODULE}),
        ({BACKEND: "gloo"}, {MODULE: verl_config.GLOO_MODULE}),
        (SEPARATE | {BACKEND: "mine", MODULE: "mine"}, {}),
        (SEPARATE | {MODULE: "mine"}, {}),
        (SEPARATE | {"trainer.use_v1": False}, {}),
        ({"trainer.v1.trainer_mode": "colocate_async", BACKEND: "naive"}, {}),
        ({}, {}),
    ],
)
def test_separate_rollouts_get_the_checkpoint_engine_gloo(changes, expected):
    assert dict(verl_config.transfer(reader(**changes))) == expected


def test_separate_rollouts_get_slots_of_their_own(monkeypatch):
    monkeypatch.setattr(verl_config, "_starts_ray", lambda get: True)
    assert dict(verl_config.adaptations(reader(**SEPARATE)))["ray_kwargs.ray_init.num_gpus"] == 5


def few(monkeypatch, cores, given=(), starts_ray=True, **changes):
    monkeypatch.setattr(verl_config, "cores", lambda: cores)
    monkeypatch.setattr(verl_config, "overridden", lambda: given)
    stock = {path: verl_config.DEFAULT for path in verl_config.HELPERS}
    return dict(verl_config.for_few_cores(reader(**stock, **changes), starts_ray))


def test_few_cores_get_few_helpers_and_no_dashboard_unless_numbers_were_given(monkeypatch):
    assert few(monkeypatch, 2) == {**dict.fromkeys(verl_config.HELPERS, 1), verl_config.DASHBOARD: False}
    assert set(few(monkeypatch, 8, starts_ray=False).values()) == {4}
    assert few(monkeypatch, 16) == {}
    first, *others = verl_config.HELPERS
    assert first not in few(monkeypatch, 2, given={first})
    assert set(few(monkeypatch, 2, given=None, **{verl_config.DASHBOARD: True})) == set()
    monkeypatch.setattr(verl_config, "cores", lambda: 2)
    monkeypatch.setattr(verl_config, "overridden", lambda: ())
    assert list(verl_config.for_few_cores(reader(**dict.fromkeys(verl_config.HELPERS, 3)), False)) == []


def test_what_the_command_line_gave_is_read_from_hydra(monkeypatch):
    hydra_config = pytest.importorskip("hydra.core.hydra_config")
    assert verl_config.overridden() is None
    monkeypatch.setattr(hydra_config.HydraConfig, "initialized", staticmethod(lambda: True))
    task = SimpleNamespace(overrides=SimpleNamespace(task=["reward.num_workers=8", "+new.one=2"]))
    monkeypatch.setattr(hydra_config.HydraConfig, "get", staticmethod(lambda: task))
    assert verl_config.overridden() == {"reward.num_workers", "new.one"}
