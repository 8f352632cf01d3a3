"""FlashRL's variables, YAML files, commands and profiles become options, or are named with the reason."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from migrating import loaded, migrate, script

from flashpatch.patches.fp8 import from_flashrl
from flashpatch.patches.fp8.calibration import pickle_names

RECIPE = """
RUN_NAME=${1:-"gsm8k"}
CAP=${2:-"-1"}
export FLASHRL_LOGGING_LEVEL=DEBUG
export FLASHRL_CONFIG='fp8'
export FLASHRL_LMHEAD_FP32=${3:-"1"}
python3 -m verl.trainer.main_ppo \\
    data.train_files=$HOME/train.parquet \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.actor.imp_ratio_cap=${CAP} \\
    critic.model.fsdp_config.param_offload=False 2>&1 | tee $RUN_NAME.log
"""


def test_a_script_of_the_published_kind(tmp_path: Path) -> None:
    said = migrate("flashrl", script(tmp_path, RECIPE))
    assert (said["code"], said["enable"]) == (0, ["fp8"])
    assert said["options"] == {"fp8": {"lm_head": "float32", "tis": "off"}}
    assert said["take_out"] == [
        "actor_rollout_ref.actor.imp_ratio_cap",
        "critic.model.fsdp_config.param_offload",
    ]
    assert said["verl"] == {"critic.fsdp.param_offload": "False"}
    assert any("FLASHPATCH_LOG=DEBUG" in line for line in said["otherwise"])
    choice = loaded(said["toml"], tmp_path).choices["fp8"]
    assert (choice.name, choice.options["lm_head"], choice.options["tis"]) == ("fp8", "float32", "off")


@pytest.mark.parametrize(("cap", "correction"), [("2", "2.0"), ("2.5", "2.5")])
@pytest.mark.parametrize("name", ["imp_ratio_cap", "tis_imp_ratio_cap", "behav_imp_weight_cap"])
def test_a_cap_becomes_verls_correction(cap: str, correction: str, name: str) -> None:
    said = migrate("flashrl", "FLASHRL_CONFIG=fp8", f"+actor_rollout_ref.actor.{name}={cap}")
    assert said["verl"]["algorithm.rollout_correction.rollout_is"] == "token"
    assert said["verl"]["algorithm.rollout_correction.rollout_is_threshold"] == correction
    assert said["options"] == {}


@pytest.mark.parametrize(("name", "precision"), from_flashrl.PRECISIONS.items())
def test_every_precision(name: str, precision: str, tmp_path: Path) -> None:
    said = migrate("flashrl", FLASHRL_CONFIG=name)
    assert said["enable"] == [precision]
    assert (said["code"] == 1) == (name == "int8_prune") and (
        name != "int8_prune" or "pruned" in said["stderr"]
    )
    assert loaded(said["toml"], tmp_path).choices["fp8"].options["precision"] == precision


def test_the_yaml_of_setup_is_a_fleet(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = script(
        tmp_path,
        "configs:\n"
        "- {fn: int8, load_format: auto, distributed_executor_backend: external_launcher, model: org/q.w8a8,\n"
        "   profile: /data/profile.pt}\n"
        "- {fn: bf16, load_format: dummy}\n"
        "- {fn: fp8_vllm, quantization: fp8, module_attribute_to_preserve: [workspace]}\n"
        "- {fn: bf16, model: org/other, seed: 3}\n",
        "flashrl.yaml",
    )
    for said in (migrate("flashrl", file), migrate("flashrl", FLASHRL_CONFIG=str(file))):
        fleet = [{"precision": name} for name in ("int8", "bf16", "fp8", "bf16")]
        assert said["options"]["fp8"]["fleet"] == fleet and said["enable"] == ["fp8"]
        assert loaded(said["toml"], tmp_path).choices["fp8"].options["fleet"] == fleet
        assert any(
            "flashpatch profile --model BF16 --flashrl /data/profile.pt" in one for one in said["otherwise"]
        )
        assert said["code"] == 1 and len(said["not_carried_over"]) == 2
        assert "model='org/other' in entry 3" in said["stderr"] and "seed=3 in entry 3" in said["stderr"]


@pytest.mark.parametrize("text", ["configs: []", "configs: [fp8]", "configs: {fn: fp8}"])
def test_other_configs_are_refused(text: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    said = migrate("flashrl", script(tmp_path, text, "x.yaml"))
    assert said["code"] == 1 and "has no list 'configs' of mappings" in said["stderr"]


def test_without_a_precision_nothing_is_switched_on(tmp_path: Path) -> None:
    for said in (migrate("flashrl"), migrate("flashrl", script(tmp_path, "python train.py a.b=1"))):
        assert (said["code"], said["enable"]) == (1, []) and "FLASHRL_CONFIG: not set" in said["stderr"]
        assert "leave FLASHPATCH unset" in said["toml"]


def test_setup_and_profile_in_a_script(tmp_path: Path) -> None:
    text = """
    flashrl profile -m Qwen/Qwen2.5-32B -q org/q.w8a8 -o p.pt --fn int8
    flashrl setup -m org/q.w8a8 -p p.pt --fn int8 -o $HOME/c.yaml
    flashrl setup -a --fn bf16 -o $HOME/c.yaml
    FLASHRL_CONFIG=$HOME/c.yaml python -m verl.trainer.main_ppo a.b=1
    flashrl cleanup
    """
    said = migrate("flashrl", script(tmp_path, text), HOME="/h")
    assert said["options"]["fp8"]["fleet"] == [{"precision": "int8"}, {"precision": "bf16"}]
    whole = "\n".join(said["otherwise"])
    assert "flashpatch profile --model Qwen/Qwen2.5-32B --quantized org/q.w8a8 -o p.safetensors" in whole
    assert "flashrl cleanup" in whole and said["code"] == 0


def test_a_runtime_environment_of_ray(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    said = migrate(
        "flashrl", script(tmp_path, "working_dir: .\nenv_vars: {FLASHRL_CONFIG: 'bf16'}", "runtime_env.yaml")
    )
    assert said["enable"] == ["bf16"]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FLASHRL_CONFIG", "org/repo/flashrl_config.yaml", "give the YAML file as FILE"),
        ("FLASHRL_TEST_RELOAD", "org/model", "flashpatch-verify fp8"),
        ("FLASHRL_NEW", "1", "not a known variable"),
    ],
)
def test_what_is_not_carried_over_is_named(variable: str, value: str, said: str) -> None:
    found = migrate("flashrl", f"{variable}={value}")
    assert found["code"] == 1 and f"{variable}={value}: " in found["stderr"] and said in found["stderr"]


def test_no_counterpart_is_forgotten() -> None:
    """Each variable of FlashRL is mapped, done otherwise or lost; none vanishes."""
    names = ["FLASHRL_LOGGING_FILE=x", "FLASHRL_LOGGING_CONFIGURE=1", "SGLANG_PATCH=1", "FLASHRL_CONFIG=fp8"]
    said = migrate("flashrl", *names)
    assert sorted(line.partition("=")[0] for line in said["otherwise"]) == [
        "FLASHRL_LOGGING_CONFIGURE",
        "FLASHRL_LOGGING_FILE",
        "SGLANG_PATCH",
    ]


class Bomb:
    """Unpickling it leaves a folder behind."""

    def __init__(self, mark: Path, how) -> None:
        self.mark, self.how = mark, how

    def __reduce__(self):
        return self.how, (str(self.mark),)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("how", [os.mkdir, os.system, eval])
def test_what_a_pickle_would_call_is_named_without_running_it(protocol: int, how, tmp_path: Path) -> None:
    file, mark = tmp_path / "profile.pt", tmp_path / "ran"
    file.write_bytes(pickle.dumps({"w": [1, "two", Bomb(mark, how)]}, protocol=protocol))
    assert pickle_names.suspicious(file) == [
        f"{how.__module__}.{how.__name__}".replace("builtins", _builtins(protocol))
    ]
    assert not mark.exists()


def _builtins(protocol: int) -> str:
    return "__builtin__" if protocol < 3 else "builtins"


@pytest.fixture
def torch():
    for name in ("safetensors", "transformers"):
        pytest.importorskip(name)
    return pytest.importorskip("torch")


def entry(torch, kind: str) -> dict:
    """What FlashRL stores of a tensor."""
    return {"input_scale": torch.ones(4), "output_scale": 2.0, "type": getattr(torch, kind)}


def test_scales_for_int8_are_converted_by_a_command(torch, tmp_path: Path) -> None:
    file = tmp_path / "profile.7b.pt"
    torch.save({"m.a.weight": entry(torch, "int8"), "m.norm.weight": entry(torch, "bfloat16")}, file)
    said = migrate("flashrl", file, "FLASHRL_CONFIG=int8")
    assert said["code"] == 0 and said["enable"] == ["int8"]
    whole = "\n".join(said["otherwise"])
    assert (
        "scales of 2 tensors for int8" in whole and "--flashrl" in whole and "profile.7b.safetensors" in whole
    )


def test_names_for_fp8_are_not_needed(torch, tmp_path: Path) -> None:
    torch.save(["m.a.weight"], tmp_path / "p.pt")
    said = migrate("flashrl", tmp_path / "p.pt", "FLASHRL_CONFIG=fp8_channel")
    assert any("names 1 weights that were fp8; not needed" in line for line in said["otherwise"])


@pytest.mark.parametrize("bare", [False, True], ids=["torch.save", "pickle"])
@pytest.mark.parametrize("how", [os.mkdir, os.system, eval])
def test_a_profile_with_code_is_refused_by_name_and_does_not_run(
    torch, bare: bool, how, tmp_path: Path
) -> None:
    mark, file = tmp_path / "ran", tmp_path / "profile.pt"
    held = {"m.a.weight": entry(torch, "int8"), "m.b.weight": Bomb(mark, how)}
    if bare:
        file.write_bytes(pickle.dumps(held))
    else:
        torch.save(held, file)
    said = migrate("flashrl", file)
    assert (said["code"], "toml" in said, mark.exists()) == (1, False, False)
    assert f".{how.__name__}; nothing in it was executed" in said["stderr"] and "profile.pt" in said["stderr"]


def test_the_bomb_is_no_dud(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran", os.mkdir)))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("held", [{}, [], 3, {"a": 1}, {"m.a.weight": {"type": 1}}, ["a/../b"]])
def test_what_is_no_profile_is_refused(torch, held: object, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "profile.pt")
    said = migrate("flashrl", tmp_path / "profile.pt")
    assert said["code"] == 1 and "profile.pt" in said["stderr"] and "toml" not in said
