"""What the family makes of a recipe, read from the recipe alone."""

import json
import shutil
from pathlib import Path

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.eagle import FAMILY
from flashpatch.patches.eagle.verl import speculation, verl_config
from flashpatch.patches.eagle.verl.speculation import SGLANG, SPECULATIVE, Speculation

OFF = {name: option.default for name, option in FAMILY.options.items()}
ROLLOUT_PATH, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
NAME = f"{ROLLOUT_PATH}.name"
ROLLOUT = {NAME: "vllm"}
SGLANGS = {NAME: "sglang"}


def reader(settings):
    return lambda path, default=None: settings.get(path, default)


@pytest.mark.parametrize(
    "given", [{"method": "eagle", "model": "/d"}, '{"method": "eagle", "model": "/d"}', None, ""]
)
def test_the_recipes_own_drafter_is_read_as_verl_reads_it(given):
    found = speculation.Vllm().configured(reader({SPECULATIVE: given}))
    assert found == (Speculation("eagle", "/d") if given else Speculation())


@pytest.mark.parametrize("given", ["{", "[1]", 3])
def test_what_is_no_mapping_is_refused(given):
    with pytest.raises(PatchError, match="is not a mapping"):
        speculation.Vllm().configured(reader({SPECULATIVE: given}))


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({NAME: "trtllm"}, {}, "rollout.name=trtllm"),
        (ROLLOUT | {SPECULATIVE: {"method": "ngram"}}, {}, "ngram"),
        (SGLANGS | {f"{SGLANG}.speculative_algorithm": "NGRAM"}, {}, "speculative_algorithm=NGRAM"),
        (SGLANGS | {f"{SGLANG}.speculative_draft_model_path": "/d"}, {}, "draft_model_path=/d"),
        (SGLANGS | {f"{SGLANG}.speculative_eagle_topk": 4}, {}, "need speculative_num_draft_tokens"),
        (ROLLOUT | {"actor_rollout_ref.model.mtp.enable": True}, {}, "mtp.enable=True"),
        (ROLLOUT, {"drafter": "/nowhere"}, "no config.json"),
    ],
)
def test_a_drafter_by_option_and_a_recipe_against_it(settings, options, said):
    options = {**OFF, "drafter": "new", **options}
    dialect = speculation.of(reader(settings))
    assert any(said in reason for reason in verl_config.refusals(reader(settings), options, dialect))
    assert not list(verl_config.refusals(reader(settings), OFF, dialect))


@pytest.mark.parametrize(
    ("settings", "found", "said"),
    [
        ({NAME: "trtllm"}, Speculation(), "for vllm and sglang"),
        (ROLLOUT, Speculation(), "drafts with nothing"),
        (SGLANGS, Speculation(), "drafts with nothing"),
        (ROLLOUT, Speculation("ngram"), "drafts with ngram"),
        (ROLLOUT, Speculation("eagle", "someone/drafter"), "is not a folder"),
        (SGLANGS | {"actor_rollout_ref.rollout.data_parallel_size": 2}, Speculation("eagle", "/"), "size=2"),
        (
            SGLANGS | {"actor_rollout_ref.rollout.disaggregation.enabled": True},
            Speculation("eagle", "/"),
            "prefill",
        ),
        (ROLLOUT | {"trainer.v1.trainer_mode": "separate_async"}, Speculation(), "rollouts never pause"),
    ],
)
def test_why_no_drafter_is_trained(tmp_path, settings, found, said):
    settings = {"actor_rollout_ref.model.path": str(tmp_path), **settings}
    dialect = speculation.of(reader(settings))
    assert any(said in reason for reason in verl_config.remarks(reader(settings), OFF, dialect, found))


def wanted(settings, tokens=3):
    settings = SGLANGS | {f"{SGLANG}.{name}": value for name, value in settings.items()}
    found = speculation.Sglang().wanted(reader(settings), Speculation("eagle", "/d"), tokens)
    return {path.removeprefix(f"{SGLANG}."): value for path, value in found}


def test_sglangs_settings_follow_the_option_where_the_user_chose_none():
    chain = dict(speculative_algorithm="EAGLE", speculative_draft_model_path="/d", speculative_num_steps=3)
    chain |= dict(speculative_eagle_topk=1, speculative_num_draft_tokens=4)
    assert wanted({}) == chain
    tree = {"speculative_num_steps": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}
    left = {name: chain[name] for name in ("speculative_algorithm", "speculative_draft_model_path")}
    assert wanted(tree) == left


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {"enable_draft_weights_cpu_backup"}),
        ({f"{SGLANG}.enable_memory_saver": False}, set()),
        ({"actor_rollout_ref.rollout.free_cache_engine": False}, set()),
        (
            {"actor_rollout_ref.rollout.load_format": "dummy"},
            {"enable_draft_weights_cpu_backup", "speculative_draft_load_format"},
        ),
        ({f"{SGLANG}.enable_draft_weights_cpu_backup": False}, set()),
    ],
)
def test_a_drafter_keeps_its_weights_on_sglang(settings, names):
    get = reader(SGLANGS | settings)
    found = dict(speculation.Sglang().needed(get, Speculation("eagle", "/d")))
    assert {path.removeprefix(f"{SGLANG}.") for path in found} == names
    assert not list(speculation.Sglang().needed(get, Speculation()))


@pytest.mark.parametrize(
    ("algorithm", "method"), [("EAGLE", "eagle"), ("EAGLE3", "eagle3"), ("NGRAM", "NGRAM"), (None, "")]
)
def test_sglangs_own_settings_are_read(algorithm, method):
    settings = {f"{SGLANG}.speculative_algorithm": algorithm, f"{SGLANG}.speculative_draft_model_path": "/d"}
    assert speculation.Sglang().configured(reader(settings)) == Speculation(method, "/d")


@pytest.mark.parametrize(("engine", "kind"), [("vllm", "eagle3"), ("sglang", "eagle3"), ("sglang", "eagle")])
def test_a_drafter_that_can_be_trained_is(tmp_path, engine, kind):
    settings = {"actor_rollout_ref.model.path": str(tmp_path), "trainer.default_local_dir": "/saved"}
    settings |= {NAME: engine, f"{ACTOR}.strategy": "fsdp"}
    (tmp_path / "config.json").write_text("{}")
    found, dialect = Speculation(kind, str(tmp_path)), speculation.of(reader(settings))
    assert not list(verl_config.remarks(reader(settings), OFF, dialect, found))
    options = {**OFF, "trainer": ["rate=1e-3", "least=4", "ttt_decay=0.5", "ttt_steps=3"]}
    made = verl_config.training(reader(settings), options, dialect, found)
    asked = dict(target=str(tmp_path), kind=kind, rate=1e-3, least=4)
    asked |= dict(engine=engine, ttt_steps=3, ttt_decay=0.5)
    assert asked.items() <= made["settings"].items() and "queue" not in made["settings"]
    (tmp_path / "model.safetensors").write_bytes(b"another")
    other = verl_config.training(reader(settings), options, dialect, found)["settings"]["folder"]
    assert other != made["settings"]["folder"] and other.startswith("/saved/eagle/"), (
        "of another model or drafter"
    )


def test_drafters_of_another_model_engine_or_first_drafter_have_a_folder_of_their_own(tmp_path):
    for name in (
        "target",
        "moved",
        "first",
        "second",
    ):  # the ends of the files are alike, as of heads with one mask
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode().ljust(1 << 20))

    def folder(model="target", engine="vllm", drafter="", own="first"):
        get = reader({"actor_rollout_ref.model.path": str(tmp_path / model), NAME: engine})
        return verl_config._folder(get, {**OFF, "drafter": drafter}, speculation.of(get), str(tmp_path / own))

    others = [dict(model="moved"), dict(engine="sglang"), dict(own="second"), dict(drafter="new")]
    assert len({folder(), *(folder(**other) for other in others), folder(drafter="new-eagle3")}) == 6
    assert folder() == folder() and folder(drafter="new") == folder(drafter="new", own="second")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("value", "method"), [("new", "eagle"), ("new-eagle3", "eagle3")])
def test_a_drafter_from_scratch_is_of_the_kind_that_the_option_names(tmp_path, engine, value, method):
    pytest.importorskip("torch")
    from flashpatch.patches.eagle.train.export import check_round_trip
    from flashpatch.verify.probes.eagle import tiny

    target = tiny.target(tmp_path / "target", layers=7)
    settings = {"actor_rollout_ref.model.path": str(target), "trainer.default_local_dir": str(tmp_path)}
    settings[NAME] = engine
    get, options = reader(settings), {**OFF, "drafter": value}
    found = verl_config._drafter(get, options, speculation.of(get))
    assert found.method == method
    check_round_trip(found.model, target, method, engine)
    for number in (9, 10):
        shutil.copytree(found.model, Path(found.model).with_name(f"drafter-{number}"))
    assert verl_config._drafter(get, options, speculation.of(get)).model.endswith("drafter-10"), (
        "a job that is resumed"
    )


def test_eagle3_is_refused_for_a_target_without_three_inner_layers(tmp_path):
    pytest.importorskip("torch")
    from flashpatch.verify.probes.eagle import tiny

    get = reader(
        {NAME: "vllm", "actor_rollout_ref.model.path": str(tiny.target(tmp_path / "target", layers=6))}
    )
    with pytest.raises(PatchError, match="has 6 layers.*drafter=new makes an EAGLE-1 drafter"):
        verl_config._drafter(get, {**OFF, "drafter": "new-eagle3"}, speculation.of(get))


def test_a_model_that_the_hub_names_is_trained_for(validated, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: {"org/model": tmp_path / "target"}[name])
    assert SPECULATIVE in validated({"actor_rollout_ref.model.path": "org/model"}, drafter="new").set_to
    assert not validated({"actor_rollout_ref.model.path": "org/other"}, drafter="new").set_to


@pytest.mark.parametrize("text", ["batch=0", "rate=-1", "rate=nan", "ttt_decay=1.5", "dtype=bf16"])
def test_a_trainers_value_that_describes_no_training_is_refused_before_the_job(validated, text):
    with pytest.raises(PatchError, match=f"{text.partition('=')[0]}=.*describes no training"):
        validated({}, drafter="new", trainer=[text])


@pytest.mark.parametrize(
    "text", ["rate", "rates=1", "rate=fast", "least=1.5", "queue=/x", "steps=any", "on=workers"]
)
def test_a_trainers_setting_that_is_none_is_refused(text):
    with pytest.raises(PatchError, match="option trainer has") as raised:
        verl_config._trainer_settings({**OFF, "trainer": [text]})
    assert "rate" in str(raised.value)


class Job(verl_config.JobConfig):
    """A job's configuration, read from a mapping."""

    def __init__(self, settings):
        self.get, self.set_to, self.patch_id = reader(settings), {}, verl_config.ID

    def set(self, path, value, reason):
        self.set_to[path] = value


@pytest.fixture
def validated(tmp_path, monkeypatch):
    """Return a function that validates a configuration, for a model of 7 layers, with options; it returns the job."""
    pytest.importorskip("torch")
    from flashpatch.verify.probes.eagle import tiny

    target = str(tiny.target(tmp_path / "target", layers=7))

    def validate(settings, **options):
        where = {"actor_rollout_ref.model.path": target, "trainer.default_local_dir": str(tmp_path / "saved")}
        job = Job({**ROLLOUT, f"{ACTOR}.strategy": "fsdp", **where, **settings})
        monkeypatch.setattr(verl_config.JobConfig, "open", lambda config, patch: job)
        monkeypatch.setattr(verl_config.engine, "options", lambda family: {**OFF, **options})
        assert verl_config.validate_config(lambda config: "validated", None) == "validated"
        return job

    return validate


@pytest.mark.parametrize("cotrain", [True, False])
def test_a_drafter_that_cannot_be_trained_is_refused_by_name_before_the_job(validated, tmp_path, cotrain):
    from drafter_lab import make_target, publish

    target = make_target()
    target.save_pretrained(tmp_path / "other")
    odd = publish(tmp_path / "odd", target.config, 40, fc_norm=True)
    model = {"actor_rollout_ref.model.path": str(tmp_path / "other")}
    if cotrain:
        with pytest.raises(PatchError, match="odd cannot be trained: fc_norm=True.*cotrain off"):
            validated(model, drafter=str(odd))
    else:
        validated(model, drafter=str(odd), cotrain=False)


@pytest.mark.parametrize(
    ("mode", "cotrain"), [("separate_async", True), ("stream_async", True), (None, False), (None, True)]
)
def test_a_drafter_from_scratch_that_nothing_trains_is_not_drafted_with(
    validated, tmp_path, caplog, mode, cotrain
):
    """Without pauses or co-training the engine is opened as without the family: a random drafter only costs time."""
    job = validated({"trainer.v1.trainer_mode": mode}, drafter="new", cotrain=cotrain)
    trains = mode is None and cotrain
    assert (SPECULATIVE in job.set_to) == trains == (tmp_path / "saved").exists()
    assert ("eagle drafts nothing: drafter=new is random" in caplog.text) == (not trains)


@pytest.mark.parametrize("kind", ["new", "new-eagle3"])
@pytest.mark.parametrize(
    ("settings", "options", "why"),
    [
        ({}, {}, ""),
        ({}, {"capture": "engine"}, "capture=engine"),
        ({}, {"samples": "/mine"}, "samples=/mine"),
        ({"algorithm.rollout_correction.bypass_mode": True}, {}, "bypass_mode=True (there is no such pass)"),
        ({f"{ACTOR}.strategy": "megatron"}, {}, "strategy=megatron"),
        ({f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2}, {}, "each rank has a part"),
    ],
)
def test_states_are_the_trainers_where_it_computes_them_and_else_the_engines(
    validated, tmp_path, caplog, settings, options, kind, why
):
    job = validated(settings, drafter=kind, **options)
    key = f"{ROLLOUT_PATH}.engine_kwargs.flashpatch"
    queue = json.loads(job.set_to[key]["eagle"])["settings"].get("queue", "")
    [folder] = (tmp_path / "saved" / "eagle").iterdir()
    assert queue == ("" if why else str(folder / "samples"))
    assert (why or "states of the trainer's pass for old log-probabilities") in caplog.text
    if why and "capture" not in options:
        with pytest.raises(PatchError, match="option capture=trainer cannot be had"):
            validated(settings, drafter=kind, capture="trainer", **options)
    if why and kind == "new-eagle3":  # SGLang hands out no states for it
        assert not validated({**settings, NAME: "sglang"}, drafter=kind, **options).set_to


def test_a_drafter_that_names_layers_of_its_own_is_trained_on_the_engines_states(tmp_path):
    for name, entries in (("plain", {}), ("own", {"eagle_config": {verl_config._OWN_LAYERS: [1, 3, 4]}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(entries))
        settings = {f"{ACTOR}.strategy": "fsdp2"}
        why = list(verl_config.no_states(reader(settings), OFF, Speculation("eagle3", str(tmp_path / name))))
        assert len(why) == (name == "own") and all(verl_config._OWN_LAYERS in one for one in why)
