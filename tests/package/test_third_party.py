"""The example of a third party's patch distribution, installed like one."""

import json
import shutil
from pathlib import Path

import pytest

HELLO = "from rich.console import Console; Console().print('hello')"


@pytest.fixture(scope="module")
def joined(tree: Path, wheel: Path, new_environment, tmp_path_factory):
    """An environment with FlashPatch and the example."""
    source = tmp_path_factory.mktemp("example") / "source"
    shutil.copytree(tree / "examples/third_party_patch", source)
    environment = new_environment()
    environment.pip("install", "--no-deps", "--no-build-isolation", wheel, source)
    return environment


def test_it_is_off_until_the_variable_switches_it_on(joined) -> None:
    assert joined.python(HELLO) == "hello"
    code = f"import os; print(os.getpid()); {HELLO}"
    pid, said = joined.python(code, FLASHPATCH="whoami").splitlines()
    assert said == f"{pid}: hello"


def test_the_command_lists_it_like_any_other(joined) -> None:
    listed = json.loads(joined.run("flashpatch", "list", "--json").stdout)
    (patch,) = [patch for patch in listed["patches"] if patch["family"] == "whoami"]
    assert (patch["contract"], patch["tested"], patch["state"]) == ("holds", False, "disabled")
    listed = json.loads(joined.run("flashpatch", "list", "--json", FLASHPATCH="whoami").stdout)
    (patch,) = [patch for patch in listed["patches"] if patch["family"] == "whoami"]
    assert patch["state"] == "waiting"
