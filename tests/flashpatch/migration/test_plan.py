"""What is given, and the configuration that is written: TOML that reads back, whatever values hold."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpatch import PatchError, registry
from flashpatch.migration import toml
from flashpatch.migration.given import Given, Setting
from flashpatch.migration.plan import Plan

SCRIPT = """
export MODE=fast
KIND=slow torchrun --nproc_per_node=8 --nnodes 2 train.py --rate 1e-6 --flag --name=x a.b=1 +c.d=[1,2] plain
python3 -m pkg.main ++e.f='x y' ~g.h=0 2>&1 | tee log
ray job submit --no-wait -- python3 -m other.main i.j=2
"""


def test_a_script_is_sorted() -> None:
    found = Given()
    found.add_script(SCRIPT, "run.sh")
    assert {name: one.value for name, one in found.variables.items()} == {"MODE": "fast", "KIND": "slow"}
    assert {str(one) for one in found.overrides.values()} == {
        "a.b=1",
        "+c.d=[1,2]",
        "++e.f=x y",
        "~g.h=0",
        "i.j=2",
    }
    train, main, _, other = found.calls
    assert (train.launcher, train.program, train.plain, train.place) == (
        "torchrun",
        "train.py",
        ("plain",),
        "run.sh:3",
    )
    assert {name: one.value for name, one in train.arguments.items()} == {
        "--rate": "1e-6",
        "--flag": "True",
        "--name": "x",
    }
    assert {name: one.value for name, one in train.launcher_arguments.items()} == {
        "--nproc_per_node": "8",
        "--nnodes": "2",
    }
    assert (main.program, other.program) == ("pkg.main", "other.main")


def test_yaml_is_flattened(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    found = Given()
    found.add_yaml(
        "speculative:\n  enable: true\n  eagle: {spec_steps: 8, path: null}\nenv_vars: {A: 'b'}",
        tmp_path / "x.yaml",
    )
    assert {name: one.value for name, one in found.overrides.items()} == {
        "speculative.enable": "True",
        "speculative.eagle.spec_steps": "8",
        "speculative.eagle.path": "null",
    }
    assert found.variables["A"].value == "b"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: !!python/object/apply:os.system [touch {mark}]", "is not plain YAML"),
        ("a: &x [1]\nb: *x", "uses YAML anchors"),
        ("a: [", "is not plain YAML"),
    ],
)
def test_yaml_that_is_no_plain_data_is_refused(text: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    mark = tmp_path / "ran"
    with pytest.raises(PatchError, match=said):
        Given().add_yaml(text.replace("{mark}", str(mark)), tmp_path / "x.yaml")
    assert not mark.exists()


def test_without_pyyaml_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(PatchError, match="PyYAML is not installed. Install PyYAML"):
        Given().add_yaml("a: 1", tmp_path / "x.yaml")


def test_brackets_without_end_are_refused() -> None:
    with pytest.raises(PatchError, match="nested too deeply"):
        Given().add_script("show " + "${A:-" * 5_000, "run.sh")


def test_an_option_that_does_not_take_the_value_is_lost() -> None:
    plan = Plan("a fork")
    plan.option("flowrl", "num_layers", 0, Setting("layers", "0", "run.sh:1"))
    plan.option("flowrl", "no_such_option", 1, "it")
    plan.option("flowrl", "beta", 3.0, Setting("beta", "$BETA", "run.sh:2"))
    assert not plan.tables and [what for what, _ in plan.lost] == ["layers=0", "it", "beta=$BETA"]
    assert "unknown option 'no_such_option'" in plan.lost[1][1] and "only a run" in plan.lost[2][1]


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_value_reads_back_and_ends_no_comment(value: str, elsewhere: str) -> None:
    plan = Plan("a fork")
    plan.enable("eagle")
    plan.option("eagle", "trainer", [value, "x"])
    plan.lose(elsewhere, elsewhere)
    plan.do_otherwise(value, elsewhere)
    plan.set_verl(value, elsewhere, value)
    text = plan.text(elsewhere, [value])
    assert tomllib.loads(text) == {"enable": ["eagle"], "eagle": {"trainer": [value, "x"]}}


@pytest.mark.parametrize("value", [True, False, 3, -1.5, 1e-06, 'a"b\\c', ["x", "y"], []])
def test_values_are_toml(value: object) -> None:
    assert tomllib.loads(f"a = {toml.value(value)}") == {"a": value}


def test_the_forks_have_modules_that_need_neither_torch_nor_a_framework() -> None:
    import subprocess

    names = registry.migrations()
    assert set(names) == {"flashrl", "fastrl", "flowrl", "async-grpo"}
    code = (
        "import sys, importlib\n"
        f"for name in {list(names.values())}: assert importlib.import_module(name).HELP\n"
        "print([name for name in ('torch', 'vllm', 'verl', 'sglang', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
