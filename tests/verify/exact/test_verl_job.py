"""What a job of verl would open, read from its arguments; and a job whose engine is told other numbers than its trainer."""

import json
import sys
import time
from pathlib import Path

import pytest
from cpu_lab import python, tail
from verl_job import COMMAND, make_world
from vllm_lab import models

from flashpatch.verify.exact.verl_job import ACTOR, MODEL, ROLLOUT, Job, JobError, Trainer, composed, read

CERTIFY = "import sys; from flashpatch.verify.cli import main; sys.exit(main(['exact', '--json', '--verl', *sys.argv[1:]]))"
CAUSES = CERTIFY.replace("'--json'", "'--json', '--causes'")
PLAIN = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.enforce_eager": True, f"{MODEL}.path": "policy"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def job(**changes: object) -> Job:
    values = {**PLAIN, **{name.replace("__", "."): value for name, value in changes.items()}}
    return read(lambda path, default=None: values.get(path, default))


def test_a_plain_job_leaves_nothing_out_with_or_without_tensor_parallelism() -> None:
    assert job() == Job("policy", {"max_model_len": None}, kind="vllm")
    found = job(**{f"{ROLLOUT}.tensor_model_parallel_size": 2})
    assert found == Job("policy", {"tensor_parallel_size": 2, "max_model_len": None}, kind="vllm")


def test_a_job_on_sglang_opens_its_engine() -> None:
    own = {f"{ROLLOUT}.engine_kwargs.sglang": {"attention_backend": "fa3", "load_format": "dummy"}}
    changes = {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.max_model_len": 64, f"{ROLLOUT}.dtype": "bfloat16"}
    wanted = {"dtype": "bfloat16", "attention_backend": "fa3", "context_length": None}
    assert job(**own, **changes) == Job("policy", wanted, kind="sglang")
    (said,) = job(**changes, **{f"{ROLLOUT}.tensor_model_parallel_size": 2}).left_out
    assert said == f"{ROLLOUT}.tensor_model_parallel_size=2 (is compared without)"


def test_what_the_trainers_probabilities_depend_on_is_read() -> None:
    assert job().trainer == Trainer()
    changes = {f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.top_k": 50}
    found = job(**changes).trainer
    assert found == Trainer(0.9, 50)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (f"{ROLLOUT}.pipeline_model_parallel_size", 2, "is compared without"),
        (f"{ACTOR}.ulysses_sequence_parallel_size", 2, "is compared without"),  # verl's older place
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 2, "is compared without"),
        (f"{ROLLOUT}.enforce_eager", False, "captured graphs"),
        (f"{MODEL}.lora_rank", 8, "its base is compared"),
        (f"{MODEL}.lora_adapter_path", "trained", "the base is compared without it"),
        (f"{ROLLOUT}.mtp.enable_rollout", True, "target's numbers"),
    ],
)
def test_what_is_left_out_is_named(path: str, value: object, named: str) -> None:
    also = {f"{MODEL}.lora_rank": 8} if value == "trained" else {}  # which is then no new one
    (said,) = job(**{path: value, **also}).left_out
    assert path in said and named in said


def test_the_trainers_model_has_the_config_that_verl_gives_it(tmp_path) -> None:
    model = models.checkpoint(tmp_path, "llama")
    written = (model / "config.json").read_text()
    own = {"attn_implementation": "sdpa", "rms_norm_eps": 0.1}
    changes = {f"{MODEL}.path": str(model), f"{MODEL}.override_config": own}
    found = job(**changes)
    assert found.engine["model"] == found.model == str(model) and not found.problem
    with found.trainers_model() as changed:
        config = json.loads(Path(changed, "config.json").read_text())
        weights = {file.name for file in Path(changed).glob("*.safetensors")}
    assert config == json.loads(written) | {"rms_norm_eps": 0.1} and weights
    assert (model / "config.json").read_text() == written
    of_megatron = job(**changes | {f"{MODEL}.override_config": {"model_config": own}})
    assert of_megatron.overrides == found.overrides == {"rms_norm_eps": 0.1}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    of_path = job(**{f"{MODEL}.path": str(model), f"{MODEL}.hf_config_path": str(other)})
    with of_path.trainers_model() as changed:
        assert json.loads(Path(changed, "config.json").read_text()) == config


def test_a_config_that_verl_cannot_build_either_says_so(tmp_path) -> None:
    """Positions are a dictionary in transformers 5, of which verl sets attributes."""
    own = {f"{MODEL}.override_config": {"rope_parameters": {"factor": 4.0}}}
    found = job(**own, **{f"{MODEL}.path": str(models.checkpoint(tmp_path, "llama"))})
    with pytest.raises(JobError, match="'dict' object has no attribute 'factor'"), found.trainers_model():
        pass


def test_a_plain_model_is_itself_and_the_config_of_a_name_is_not_changed(tmp_path) -> None:
    found = job(**{f"{MODEL}.override_config": {"attn_implementation": "sdpa"}})
    with found.trainers_model() as model:
        assert model == "policy" and found == job()
    found = job(**{f"{MODEL}.override_config": {"rms_norm_eps": 0.1}})
    assert found.problem.startswith(f"cannot compare here: {MODEL}.override_config changes")


@pytest.mark.parametrize(
    ("path", "value"), [(f"{ROLLOUT}.name", "trtllm"), (f"{ROLLOUT}.quantization", "fp8")]
)
def test_what_cannot_be_compared_says_why(path: str, value: str) -> None:
    assert job(**{path: value}).problem.startswith(f"cannot compare here: {path}={value}")


def printed(code: str, folder: Path, arguments: list[str], status: int, names: str) -> dict:
    """What the command prints as JSON under these names."""
    done = python(code, folder, arguments=arguments, FLASHPATCH=names)
    assert done.returncode == status, tail(done)
    return json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{\n") :])[0]


@pytest.mark.verl
def test_the_engine_is_the_rollouts() -> None:
    own = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    found = composed([*COMMAND, f"{MODEL}.path=policy", f"{own}.load_format=dummy", f"{own}.seed=3"])
    sizes = dict(
        max_model_len=64, max_num_seqs=32, max_num_batched_tokens=512, kv_cache_memory_bytes=32 << 20
    )
    ways = dict(enable_chunked_prefill=True, enable_prefix_caching=True, trust_remote_code=False)
    wanted = dict(dtype="bfloat16", seed=3, gpu_memory_utilization=0.1, **sizes, **ways)
    assert found == Job("policy", wanted, kind="vllm")
    with pytest.raises(JobError, match="nowhere"):
        composed(["nowhere=1"])


@pytest.mark.full  # in make test a job of verl asks for the same: tests/patches/fp8/verl/test_certificate.py
@pytest.mark.verl
@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ((), None),
        ((f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.rms_norm_eps=0.1",), "model.layers.0.input_layernorm"),
        ((f"+{MODEL}.override_config.rms_norm_eps=0.1",), "model.layers.0.input_layernorm"),
    ],
)
def test_a_setting_that_changes_one_side_alone_is_found(world, tmp_path, setting, place) -> None:
    given = [*COMMAND, f"{MODEL}.path={world}/model", *setting]
    found = printed(CERTIFY, tmp_path, given, bool(setting), "cpu,bf16")
    assert found["first"] == place and found["seconds"]["engine"] > 0, found


@pytest.mark.full
@pytest.mark.verl
def test_the_causes_of_a_job_are_its_engines_and_its_trainers(world, tmp_path) -> None:
    given = [*COMMAND, f"{MODEL}.path={world}/model", f"{ROLLOUT}.top_p=0.9"]
    found = printed(CAUSES, tmp_path, given, 0, "cpu,int8")
    seen = {cause["name"]: cause for cause in found["causes"]}
    unswitched = {name: cause["problem"] for name, cause in seen.items() if cause["problem"]}
    assert set(unswitched) <= {"head"}, unswitched  # which vLLM before 0.26 leaves in its dtype
    assert seen["weights"]["share"] > 0.5 and seen["truncated sampling"]["share"] < -1
    for name in ("remove padding", "padding", "position ids", "trainer's attention"):
        assert abs(seen[name]["share"]) < 0.05, seen[name]


@pytest.mark.full
@pytest.mark.verl
@pytest.mark.sglang
@pytest.mark.parametrize("setting", [None, '{"rms_norm_eps": 0.1}'])
def test_a_setting_that_changes_sglang_alone_is_found(world, tmp_path, setting) -> None:
    from flashpatch.patches.cpu.verl_config import sglang_arguments

    own = f"+{ROLLOUT}.engine_kwargs.sglang.json_model_override_args='{setting}'"
    given = [*COMMAND, f"{MODEL}.path={world}/model", f"{ROLLOUT}.name=sglang", *([own] if setting else [])]
    # What the family cpu sets once a job has begun, before it compares.
    more = sglang_arguments(lambda path, default=None: default)
    given += [f"+{path}={value}" for path, value in more if not path.endswith("max_total_tokens")]
    found = printed(CERTIFY, tmp_path, given, bool(setting), "cpu,bf16")
    assert found["first"] == ("model.layers.0.input_layernorm" if setting else None), found
    assert found["engine"] == "sglang" and found["seconds"]["engine"] > 0


def test_a_comparison_that_hangs_is_given_up(monkeypatch, capsys) -> None:
    from flashpatch.verify.exact import command

    monkeypatch.setattr(command.os, "_exit", lambda code: sys.stdout.write(f"exit {code}"))
    with command._bounded(0.05, as_json=False):
        time.sleep(0.5)
    assert "not done within 0.05 seconds" in (said := capsys.readouterr().out) and said.endswith("exit 1")
