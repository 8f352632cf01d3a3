"""The command ``flashpatch migrate``: which files it takes, and what it says of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from migrating import migrate, script

from flashpatch import PatchError, registry
from flashpatch.migration.given import LIMIT
from flashpatch.record import Family


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from flashpatch.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, "migrate", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [[], ["--from"], ["--from", "openrlhf"]])
def test_wrong_use(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and not done.stdout
    assert "openrlhf" not in arguments or "choose from async-grpo, fastrl, flashrl, flowrl" in done.stderr


def test_standard_output_is_the_configuration_alone(tmp_path: Path) -> None:
    done = run("--from", "flowrl", "algorithm.tb_coef=5", "algorithm.use_kl_in_reward=True")
    assert done.returncode == 1 and done.stdout.startswith("# What FlowRL was told")
    assert done.stderr.splitlines() == [
        "not carried over: algorithm.use_kl_in_reward=True: FlowRL's loss has the reference already"
    ]


@pytest.mark.parametrize("name", ["nowhere.sh", "nowhere.yaml", "folder"])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    said = migrate("fastrl", tmp_path / name)
    assert (
        said["code"] == 1
        and "cannot read" in said["stderr"]
        and name in said["stderr"]
        and "toml" not in said
    )


@pytest.mark.parametrize("name", ["run.sh", "run.yaml"])
def test_a_file_that_is_too_large_or_no_text(name: str, tmp_path: Path) -> None:
    file = script(tmp_path, "# " + "x" * LIMIT, name)
    assert "is larger than 1 MiB" in migrate("fastrl", file)["stderr"]
    file.write_bytes(b"a=\xff\xfe")
    assert "cannot read" in migrate("fastrl", file)["stderr"]


def test_a_file_that_nobody_reads_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"\0\1\2")
    said = migrate("flowrl", file, "algorithm.tb_coef=5")
    assert said["code"] == 1 and "model.bin: neither a script nor YAML" in said["stderr"]


def test_later_files_and_words_win(tmp_path: Path) -> None:
    first = script(tmp_path, "python x.py algorithm.tb_coef=5", "a.sh")
    second = script(tmp_path, "python x.py algorithm.tb_coef=6", "b.sh")
    assert migrate("flowrl", first, second)["options"]["flowrl"]["beta"] == 6.0
    assert migrate("flowrl", second, first, "algorithm.tb_coef=7")["options"]["flowrl"]["beta"] == 7.0


def test_two_families_cannot_take_over_one_fork() -> None:
    found: dict[str, Family] = {}
    registry._admit(Family("one", "", (), migrations={"fork": "a"}), found)
    with pytest.raises(ValueError, match="'fork' are taken over by 'one'"):
        registry._admit(Family("two", "", (), migrations={"fork": "b"}), found)


def test_words_that_are_nothing_are_refused() -> None:
    from flashpatch.migration.given import Given

    with pytest.raises(PatchError, match="is no file and no NAME=VALUE"):
        Given().add_words(["1=2"])
