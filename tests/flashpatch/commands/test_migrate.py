"""The command ``flashpatch migrate``: what it reads, what its table makes of it, and what it says of the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashpatch import PatchError, registry
from flashpatch.commands import migrate
from flashpatch.settings import config_file, selections

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FORKS = migrate._forks()


def outcome(fork: str, *files: str | Path) -> migrate.Outcome:
    return migrate.Outcome(migrate._table()[fork], migrate.read(list(map(str, files))))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from flashpatch.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, "migrate", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [[], ["--from"], ["--from", "openrlhf"]])
def test_wrong_use(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and not done.stdout
    assert "openrlhf" not in arguments or all(fork in done.stderr for fork in FORKS)


def test_standard_output_is_the_configuration_alone() -> None:
    done = run("--from", "flowrl", "algorithm.tb_coef=5", "algorithm.use_kl_in_reward=True")
    assert done.returncode == 1 and done.stdout.startswith("# What flowrl was told")
    assert done.stderr.splitlines() == [
        "not carried over: algorithm.use_kl_in_reward=True: FlowRL's loss has the reference already"
    ]


@pytest.mark.parametrize(
    "content",
    [None, b"a=\xff\xfe", b"A='open", b"#" * (migrate._LIMIT + 1)],
    ids=["none", "bytes", "quote", "long"],
)
def test_a_file_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "run.env"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PatchError, match=r"run\.env"):
        migrate.read([str(file)])


def test_what_a_file_and_the_command_line_say(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "# A=comment\nexport A='one two' B=2\npython3 -m x \\\n  +c.d=3 --e 4 --f --g=5 h.i=6\nB=7\n"
    )
    assert migrate.read([str(file), "h.i=8", "++j.k=[9,10]"]) == {
        "A": "one two", "B": "7", "c.d": "3", "--e": "4", "--f": "True", "--g": "5", "h.i": "8", "j.k": "[9,10]"
    }  # fmt: skip


def test_the_environment_is_read_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRL_CONFIG", "int8_fast")
    monkeypatch.setenv("FLASHRL_NOVEL", "1")
    found = outcome("flashrl")
    assert found.enable == ["int8"] and found.lost == ["FLASHRL_NOVEL=1: not a known setting"]


@pytest.mark.parametrize(
    ("fork", "given", "enable", "options"),
    [
        ("flashrl", ["FLASHRL_CONFIG=fp8_vllm", "FLASHRL_LMHEAD_FP32=1"], "fp8", {"fp8": {"lm_head": "float32"}}),
        ("flashrl", ["FLASHRL_CONFIG=bf16", f"+{ACTOR}.imp_ratio_cap=-1"], "bf16", {"fp8": {"tis": "off"}}),
        (
            "fastrl",
            ["speculative.train.optim.lr=1e-6", "speculative.eagle.mab_configs=[8_4_32,8_4_16]",
             "speculative.train.max_seq_len=2048", "speculative.train.enable_drafter_training=true"],
            "eagle",
            {"eagle": {"arms": ["8_4_32", "8_4_16"], "trainer": ["window=2048", "rate=1e-6"], "cotrain": True}},
        ),
        ("flowrl", [f"+{ACTOR}.tb_type=tempered_important_sampling"], "flowrl", {"flowrl": {"paper": True}}),
        ("flowrl", [f"+{ACTOR}.porj_layer=5", "algorithm.tb_coef=5"], "flowrl", {"flowrl": {"num_layers": 5, "beta": 5.0}}),
        ("flowrl", ["FLOWRL_LOSS_VARIANT=flowrl_clip"], "flowrl", {"flowrl": {"weight": "clip"}}),
        ("async-grpo", ["--loss_chunksize=2048"], "grpo", {"grpo": {"reference_every": 40, "logprobs": True}}),
    ],
)  # fmt: skip
def test_settings_become_options_that_a_job_takes(
    fork: str, given: list[str], enable: str, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcome(fork, *given)
    assert (found.enable, found.options) == ([enable], options)
    config = tmp_path / "flashpatch.toml"
    config.write_text(found.text(fork))
    monkeypatch.setenv("FLASHPATCH", "1")
    monkeypatch.setenv("FLASHPATCH_CONFIG", str(config))
    config_file.load()
    [choice] = selections.from_environment(selections.NOTHING).choices.values()
    [(family, wanted)] = options.items()
    assert registry.family_of(enable).name == family and choice.options.items() >= wanted.items()


@pytest.mark.parametrize(
    ("fork", "setting", "why"),
    [
        ("flashrl", "FLASHRL_CONFIG=fleet.yaml", "[[fp8.fleet]]"),
        ("flashrl", "FLASHRL_CONFIG=$NAME", "only a shell"),
        ("flashrl", "FLASHRL_CONFIG=int8_prune", "not pruned"),
        ("fastrl", "speculative.train.max_epochs=3", "not for epochs"),
        ("fastrl", "speculative.no_such_thing=1", "not a known setting"),
        ("flowrl", f"+{ACTOR}.porj_layer=many", "num_layers in [flowrl] does not take 'many'"),
        ("flowrl", f"+{ACTOR}.porj_layer=0", "num_layers in [flowrl] does not take '0'"),
        ("flowrl", "FLOWRL_LOSS_VARIANT=flowrl_cispo", "have options"),
        ("async-grpo", "--novel=1", "not a known setting"),
    ],
)
def test_what_there_is_not_is_named(fork: str, setting: str, why: str) -> None:
    [*_, line] = outcome(fork, setting).lost
    assert line.startswith(setting.lstrip("+")) and why in line


def test_verls_own_settings_move() -> None:
    found = outcome(
        "flowrl",
        f"{ROLLOUT}.name=sglang",
        "critic.model.fsdp_config.param_offload=False",
        "reward_model.reward_manager=dapo",
        f"{ACTOR}.imp_ratio_cap=2",
    )
    assert found.verl == {
        "algorithm.adv_estimator": "grpo",
        "critic.fsdp.param_offload": "False",
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": "2",
    }
    assert sorted(found.take_out) == [f"{ACTOR}.imp_ratio_cap", "critic.model.fsdp_config.param_offload"]
    assert outcome("flowrl").verl[f"{ROLLOUT}.name"] == "vllm"


def _actions(table: Any) -> list[dict[str, Any]]:
    """Every action of a fork's table, those by value included."""
    found = [table["always"], *table["settings"].values()]
    return [*found, *(case for action in found for case in action.get("values", {}).values())]


@pytest.mark.parametrize("fork", FORKS)
def test_the_table_names_what_there_is(fork: str) -> None:
    keys = {"enable", "option", "value", "append", "verl", "note", "lost", "keep", "values"}
    for action in _actions(migrate._table()[fork]):
        assert action.keys() <= keys
        if "enable" in action:
            registry.family_of(action["enable"])
        if "option" in action:
            family, _, name = action["option"].partition(".")
            assert name in registry.family(family).options
