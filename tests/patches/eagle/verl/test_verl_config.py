"""What the family makes of a recipe, read from the recipe alone."""

from __future__ import annotations

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.eagle import FAMILY
from flashpatch.patches.eagle.verl import verl_config
from flashpatch.settings.options import checked

OFF = {name: option.default for name, option in FAMILY.options.items()}
ROLLOUT = {"actor_rollout_ref.rollout.name": "vllm"}


def reader(settings):
    return lambda path, default=None: settings.get(path, default)


@pytest.mark.parametrize(
    "given", [{"method": "eagle", "model": "/d"}, '{"method": "eagle", "model": "/d"}', None, ""]
)
def test_the_recipes_own_drafter_is_read_as_verl_reads_it(given):
    found = verl_config.speculation(reader({verl_config.SPECULATIVE: given}))
    assert found == ({"method": "eagle", "model": "/d"} if given else {})


@pytest.mark.parametrize("given", ["{", "[1]", 3])
def test_what_is_no_mapping_is_refused(given):
    with pytest.raises(PatchError, match="is not a mapping"):
        verl_config.speculation(reader({verl_config.SPECULATIVE: given}))


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({"actor_rollout_ref.rollout.name": "sglang"}, {}, "rollout.name=sglang"),
        (ROLLOUT | {"actor_rollout_ref.model.mtp.enable": True}, {}, "mtp.enable=True"),
        (ROLLOUT, {"drafter": "/nowhere"}, "no config.json"),
    ],
)
def test_a_drafter_by_option_and_a_recipe_against_it(settings, options, said):
    options = {**OFF, "drafter": verl_config.NEW, **options}
    assert any(said in reason for reason in verl_config.refusals(reader(settings), options, {}))
    assert not list(verl_config.refusals(reader(settings), OFF, {}))


@pytest.mark.parametrize(("name", "value"), [("slice", 0.0), ("patience", 0.0), ("draft_tokens", 0)])
def test_an_option_out_of_range_is_refused(name, value):
    with pytest.raises(PatchError, match=f"option '{name}' in enable.. is {value!r}, not "):
        checked(FAMILY, {name: value}, "enable()")


def test_two_drafters_are_one_too_many():
    (reason,) = verl_config.refusals(
        reader(ROLLOUT), {**OFF, "drafter": verl_config.NEW}, {"method": "ngram"}
    )
    assert "ngram" in reason and "drafter=new" in reason


@pytest.mark.parametrize(
    ("settings", "speculative", "said"),
    [
        ({"actor_rollout_ref.rollout.name": "sglang"}, {}, "capture and bandit work there"),
        (ROLLOUT, {}, "drafts with nothing"),
        (ROLLOUT, {"method": "ngram"}, "drafts with ngram"),
        (ROLLOUT, {"method": "eagle", "model": "someone/drafter"}, "is not a folder"),
        (ROLLOUT | {"trainer.v1.trainer_mode": "separate_async"}, {}, "rollouts never pause"),
    ],
)
def test_why_no_drafter_is_trained(tmp_path, settings, speculative, said):
    settings = {"actor_rollout_ref.model.path": str(tmp_path), **settings}
    assert any(said in reason for reason in verl_config.remarks(reader(settings), speculative))


def test_a_drafter_that_can_be_trained_is(tmp_path):
    settings = ROLLOUT | {
        "actor_rollout_ref.model.path": str(tmp_path),
        "trainer.default_local_dir": "/saved",
    }
    speculative = {"method": "eagle3", "model": str(tmp_path)}
    assert not list(verl_config.remarks(reader(settings), speculative))
    options = {**OFF, "trainer": ["rate=1e-3", "least=4", "prompts=true"]}
    made = verl_config.training(reader(settings), options, speculative)
    wanted = dict(
        target=str(tmp_path), folder="/saved/eagle", kind="eagle3", rate=1e-3, least=4, prompts=True
    )
    assert wanted.items() <= made["settings"].items() and "ring" not in made["settings"]


@pytest.mark.parametrize("text", ["rate", "rates=1", "rate=fast", "least=1.5", "ring=/x"])
def test_a_trainers_setting_that_is_none_is_refused(text):
    with pytest.raises(PatchError, match="option trainer has") as raised:
        verl_config._trainer_settings({**OFF, "trainer": [text]}, "", "", "")
    assert "rate" in str(raised.value)
