"""The paper's settings, and those of the published code's command lines, as a job's configuration."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from flashpatch import engine
from flashpatch.patches.flowrl import options, verl_config

DEFAULTS = {name: option.default for name, option in options.OPTIONS.items()}


@pytest.fixture
def choose(monkeypatch):
    """Set the family's options without arming anything."""

    def chosen(**changes):
        values = {**DEFAULTS, **changes}
        monkeypatch.setattr(engine, "options", lambda family: values)
        return options.current()

    return chosen


def job(overrides=(), **settings):
    """What `JobConfig` offers, over a flat table of settings."""
    held = {path: own for path, (_, own) in verl_config.PUBLISHED.items()} | settings
    return SimpleNamespace(
        get=held.get,
        overrides=set(overrides),
        set=lambda path, value, reason: held.update({path: value}),
        held=held,
    )


def test_paper_means_the_papers_options(choose):
    assert options.PAPER.items() <= asdict(choose(paper=True)).items()
    assert choose(paper=True).dropout == 0.1 and choose().dropout == 0.0
    assert list(options.contradictions()) == []


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"paper": True, "beta": 5.0}, "beta=5.0 with paper=True (the paper has 15.0)"),
        ({"paper": True, "log_z": "group"}, "log_z='group' with paper=True (the paper has 'learned')"),
        ({"paper": True, "reward": "raw"}, "reward='raw' with paper=True (the paper has 'advantage')"),
        ({"paper": True, "lr": 1e-4}, "lr=0.0001 with paper=True (the paper has None)"),
        ({"log_z": "group", "lr": 1e-4}, "lr=0.0001 with log_z='group' (there is no partition function)"),
        (
            {"log_z": "group", "num_layers": 2},
            "num_layers=2 with log_z='group' (there is no partition function)",
        ),
    ],
)
def test_options_that_contradict_one_another_are_named(choose, changes, named):
    choose(**changes)
    assert list(options.contradictions()) == [named]


def test_options_that_agree_are_not(choose):
    choose(paper=True, dropout=0.1, num_layers=3)
    assert list(options.contradictions()) == []
    choose(log_z="group", reward="raw", beta=3.0, length="sum", weight="none")
    assert list(options.contradictions()) == []


def test_the_papers_settings_are_set_where_nobody_chose(choose):
    mine = {"actor_rollout_ref.actor.optim.lr": 3e-6}
    done = job(overrides=["actor_rollout_ref.rollout.n"], **mine)
    verl_config.take_published(done, choose(paper=True))
    kept = {**mine, "actor_rollout_ref.rollout.n": 1}
    wanted = {path: value for path, (value, _) in verl_config.PUBLISHED.items()} | kept
    assert done.held == wanted
    assert done.held["data.train_batch_size"] == 512 and done.held["algorithm.adv_estimator"] == "grpo"


def test_without_paper_nothing_is_set(choose):
    done = job()
    before = dict(done.held)
    verl_config.take_published(done, choose())
    assert done.held == before


@pytest.mark.parametrize(
    "changes, setting, value, named",
    [
        ({}, verl_config.PUBLISHED_LAYERS, 4, "porj_layer=4 (num_layers in [flowrl] is 3"),
        (
            {"log_z": "group"},
            verl_config.PUBLISHED_LAYERS,
            3,
            "porj_layer=3 (log_z = 'group' has no partition function)",
        ),
        ({}, verl_config.PUBLISHED_LOSS, "other", "tb_type=other ("),
    ],
)
def test_the_published_codes_settings_are_refused_where_they_differ(choose, changes, setting, value, named):
    (refusal,) = verl_config.published_refusals({setting: value}.get, choose(**changes))
    assert named in refusal


def test_the_published_codes_settings_are_accepted_where_they_agree(choose):
    given = {verl_config.PUBLISHED_LAYERS: 3, verl_config.PUBLISHED_LOSS: "tempered_important_sampling"}
    assert list(verl_config.published_refusals(given.get, choose())) == []
    assert list(verl_config.published_refusals({}.get, choose())) == []


def test_they_are_taken_out_for_verl(choose):
    """verl's dataclasses refuse keys that they do not know."""
    omegaconf = pytest.importorskip("omegaconf")
    from flashpatch.patches._shared.verl_config import JobConfig

    config = omegaconf.OmegaConf.create(
        {"actor_rollout_ref": {"actor": {"porj_layer": 3, "tb_type": "tempered_important_sampling", "lr": 1}}}
    )
    omegaconf.OmegaConf.set_struct(config, True)
    verl_config.take_published(
        JobConfig(config, verl_config.patches.of(verl_config.validate_config).id), choose()
    )
    assert config == {"actor_rollout_ref": {"actor": {"lr": 1}}}


@pytest.mark.parametrize(
    "setting, value", [(verl_config.SAMPLES, 1), (verl_config.TRAINER_MODE, "stream_async")]
)
def test_a_group_needs_several_responses_and_their_reference(setting, value):
    (refusal,) = verl_config.group_refusals(lambda path, default=None: {setting: value}.get(path, default))
    assert refusal.startswith(f"{setting}={value} (")
    plain = {verl_config.SAMPLES: 8, verl_config.TRAINER_MODE: "sync"}
    assert list(verl_config.group_refusals(lambda path, default=None: plain.get(path, default))) == []


@pytest.mark.verl
def test_verls_own_configuration_takes_the_papers(tmp_path):
    """verl's composed configuration, validated by verl itself, becomes its dataclasses afterwards."""
    pytest.importorskip("torch")
    import cpu_lab
    import warm

    cpu_lab.checked(
        """
        import flashpatch
        from pathlib import Path
        from verl.utils.config import omega_conf_to_dataclass
        from flashpatch.errors import PatchError
        from flashpatch.verify.probes.flowrl import tiny

        where = tiny.write_model(Path("model"))
        published = "+actor_rollout_ref.actor.porj_layer=3"
        flashpatch.enable("flowrl", paper=True)
        config = tiny.recipe(where, published)
        assert config.data.truncation == "left" and config.data.max_response_length == 8192, config.data
        assert "porj_layer" not in config.actor_rollout_ref.actor
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        assert actor.optim.lr_warmup_steps == 10, actor.optim
        assert actor.optim.weight_decay == 0.0, "the recipe's own"

        def refused(named, *settings, **options):
            flashpatch.enable("flowrl", **{"paper": False, **options})
            try:
                tiny.recipe(where, *settings)
            except PatchError as error:
                assert named in str(error), error
            else:
                raise AssertionError(named)

        refused("porj_layer=4 (num_layers", published.replace("3", "4"))
        refused("beta=5.0 with paper=True", paper=True, beta=5.0)
        refused("rollout.n=1 (log_z", "actor_rollout_ref.rollout.n=1", beta=15.0, log_z="group")
        """,
        tmp_path,
        imported=warm.VERL_VLLM,
        FLASHPATCH="cpu,bf16",
    )
