"""Reading, changing and refusing settings of verl's configuration; verl itself is not needed."""

import logging
from contextlib import nullcontext

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches._shared import verl_config
from flashpatch.patches._shared.verl_config import TARGET, JobConfig, is_chosen, overrides

omegaconf = pytest.importorskip("omegaconf")
PATH = "actor.policy_loss.loss_mode"


@pytest.fixture
def job() -> JobConfig:
    config = omegaconf.OmegaConf.create(
        {"actor": {"policy_loss": {"loss_mode": "vanilla"}, "copy": "${actor.policy_loss}"}}
    )
    omegaconf.OmegaConf.set_struct(config, True)
    return JobConfig(config, "toy.verl.validate_config")


def test_settings_are_read_as_plain_values(job):
    assert (job.get(PATH), job.get("actor.lost"), job.get("lost.path", 3)) == ("vanilla", None, 3)
    assert job.get("actor.copy") == {"loss_mode": "vanilla"} and type(job.get("actor.copy")) is dict


def test_a_setting_is_logged_once_and_added_where_it_is_missing(job, caplog):
    with caplog.at_level(logging.WARNING, logger="flashpatch.toy"):
        for _ in range(2):
            job.set(PATH, "flowrl", "the loss needs it")
            job.set("actor.engine_kwargs.own", {"a": 1})
    assert caplog.messages == [f"{PATH}=flowrl: the loss needs it", "actor.engine_kwargs.own={'a': 1}"]
    assert job.config.actor.policy_loss.loss_mode == "flowrl" and job.get("actor.engine_kwargs.own.a") == 1
    with pytest.raises(omegaconf.errors.ConfigAttributeError):
        job.config.actor.other = 1  # the structure is as closed as before


def test_all_contradictions_are_refused_in_one_error(job):
    job.refuse(iter(()), "cannot train with", "Nothing.")
    with pytest.raises(PatchError) as error:
        job.refuse(iter(["a=1 (one)", "b=2 (two)"]), "cannot train with", "Change these settings.")
    said = str(error.value)
    assert "cannot train with a=1 (one); b=2 (two)." in said
    assert "toy.verl.validate_config" in said and TARGET in said and "Change these settings." in said


def test_a_default_counts_as_chosen_only_on_the_command_line(job):
    assert not is_chosen(job.get, PATH, "vanilla")
    assert is_chosen(job.get, PATH, "vanilla", {PATH})
    assert is_chosen(job.get, PATH, "gspo")
    assert not is_chosen(job.get, "actor.lost", "vanilla", {"actor.lost"})


def test_overrides_are_those_of_the_hydra_application():
    hydra = pytest.importorskip("hydra.core.hydra_config")
    conf = pytest.importorskip("hydra.conf")
    assert overrides() == set()
    task = [f"{PATH}=flowrl", "+added.one=1", "~gone"]
    config = omegaconf.OmegaConf.structured(conf.HydraConf(overrides=conf.OverridesConf(task=task)))
    instance = hydra.HydraConfig.instance()
    before, instance.cfg = instance.cfg, omegaconf.OmegaConf.create({"hydra": config})
    try:
        assert overrides() == {PATH, "added.one", "gone"}
    finally:
        instance.cfg = before


@pytest.mark.parametrize("held", [False, True])
def test_a_checkpoint_of_other_names_is_refused_in_one_sentence(tmp_path, monkeypatch, held):
    torch, names = (
        pytest.importorskip("torch"),
        {"norm.weight": 1, **({"proj_z.net.4.weight": 1} if held else {})},
    )
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    older = {
        "norm.weight": 1,
        **({} if held else {"proj_z.net.4.weight": 1}),
    }  # of a job that this one wrote over
    for ranks, saved in (1, older), (2, names), (4, older):
        torch.save(saved, tmp_path / "global_step_3" / "actor" / f"model_world_size_{ranks}_rank_0.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    trainer = dict(
        default_local_dir=str(tmp_path), resume_from_path=str(tmp_path / "global_step_3"), n_gpus_per_node=2
    )
    for mode in "auto", "resume_path", "disable":
        config = omegaconf.OmegaConf.create({"trainer": {**trainer, "resume_mode": mode}})
        for log_z, on in (None, False), ("group", False), ("learned", True):
            monkeypatch.setattr(verl_config.engine, "enabled", lambda name, log_z=log_z: log_z is not None)
            options = {"log_z": log_z, "num_layers": 2}
            monkeypatch.setattr(verl_config.engine, "options", lambda name, options=options: options)
            with (
                nullcontext()
                if on == held or mode == "disable"
                else pytest.raises(PatchError, match="cannot resume .*=disable")
            ):
                JobConfig(config, "grpo.verl.validate_config").refuse_checkpoint()
        options["num_layers"] = 3
        if held and mode != "disable":
            with pytest.raises(PatchError, match=r"num_layers=3 \(its partition function has 2\)"):
                JobConfig(config, "grpo.verl.validate_config").refuse_checkpoint()


def test_a_checkpoint_with_a_refreshed_reference_is_refused_by_modes_that_would_drop_it(tmp_path):
    (tmp_path / "actor" / "reference").mkdir(parents=True)
    (tmp_path / "actor" / "model_world_size_1_rank_0.pt").touch()
    refused = pytest.raises(PatchError, match="cannot resume .* with trainer.v1.trainer_mode=.*reference")
    for mode, new, kl, validates, end in (
        ("stream_async", True, True, False, nullcontext()),
        ("sync", True, True, False, refused),
        ("stream_async", False, True, False, refused),
        ("sync", True, False, False, nullcontext()),  # nothing is compared with it
        ("sync", True, True, True, nullcontext()),
    ):
        trainer = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path), "use_v1": new}
        trainer |= {"v1": {"trainer_mode": mode}, "val_only": validates}
        config = omegaconf.OmegaConf.create({"trainer": trainer, "algorithm": {"use_kl_in_reward": kl}})
        with end:
            JobConfig(config, "grpo.verl.validate_config").refuse_checkpoint()


def test_replicas_that_fsdp1_does_not_couple_are_refused_unless_the_name_fsdp_couples_them(monkeypatch):
    actor = "actor_rollout_ref.actor"
    apart = {f"{actor}.strategy": "fsdp", f"{actor}.fsdp_config.fsdp_size": 1, "trainer.n_gpus_per_node": 2}

    def found(**others):
        settings = {**apart, **{name.replace("__", "."): value for name, value in others.items()}}
        return [*verl_config.parted_replicas(lambda path, default=None: settings.get(path, default))]

    assert found()[0].startswith(f"{actor}.fsdp_config.fsdp_size=1 (FSDP1 then averages no gradients")
    of_critic = dict(
        actor_rollout_ref__actor__strategy="fsdp2", critic__strategy="fsdp", critic__fsdp__fsdp_size=1
    )
    assert not found(**of_critic) and not found(**of_critic, algorithm__adv_estimator="grpo")
    critic = found(**of_critic, algorithm__adv_estimator="gae")
    assert critic[0].startswith("critic.fsdp.fsdp_size=1")
    assert not found(trainer__n_gpus_per_node=1) and not found(actor_rollout_ref__actor__strategy="fsdp2")
    monkeypatch.setattr(verl_config.engine, "enabled", lambda name: name == "fsdp")
    assert not found()
