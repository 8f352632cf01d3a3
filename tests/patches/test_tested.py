"""The versions in ``patches/tested.toml`` are those that the Makefile's lanes run a family's tests on."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from flashpatch import registry
from flashpatch.arming.preflight import examine

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TESTED = tomllib.loads((ROOT / "patches" / "tested.toml").read_text())
MARKED = ("vllm", "verl", "sglang")
BESIDE = {"torch": "verl"}
"""Frameworks without a mark: the lanes that run their patches are those of another one."""


def lanes(target: str) -> set[tuple[str, str]]:
    """Pairs of a mark and a vLLM, verl or SGLang version that commands of a Makefile target run tests with."""
    vllm = dict(re.findall(r"^\$\((\w+)\)/\.vllm: VLLM := (\S+)$", MAKEFILE, re.M))
    [verl] = set(re.findall(r"install .* verl==(\S+)", MAKEFILE))
    [sglang] = set(re.findall(r"install .* sglang==(\S+)", MAKEFILE))
    [recipe] = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    found = set()
    for environment, expression in re.findall(r"\$\((\w+)\)/bin/pytest .*?-m (?:\"(.+?)\"|\w+)", recipe):
        expression = expression or re.search(rf"\$\({environment}\)/bin/pytest -m (\w+)", recipe)[1]
        for mark in MARKED:
            if re.search(rf"\b{mark}\b|^full or not full$", expression):
                there = {"vllm": vllm.get(environment), "verl": verl if environment == "PAIRED" else None}
                there["sglang"] = sglang if environment == "SGLANG" else None
                found |= {(mark, version) for version in (there[mark],) if version}
    return found


def marks(family: str) -> dict[str, bool]:
    """Marks of a family's tests and probes; whether one of their tests is not only for the long lanes."""
    files = [*(ROOT / "tests" / "patches" / family).rglob("test_*.py")]
    files += (ROOT / "tests" / "verify" / "probes").glob(f"test_{family}*.py")
    found: dict[str, bool] = {}
    for text in map(Path.read_text, files):
        whole_file_is_long = bool(re.search(r"^pytestmark = .*mark\.full", text, re.M))
        for mark in set(re.findall(r"mark\.(vllm|verl|sglang)\b", text)):
            found[mark] = found.get(mark, False) or not whole_file_is_long
    return found


def test_the_lanes_are_understood():
    assert lanes("test-newest") == {("vllm", "0.32.0")}
    assert lanes("test-paired") == {("verl", "0.9.1"), ("vllm", "0.31.0")}
    assert lanes("test-sglang") == {("sglang", "0.5.23")}
    assert {mark for mark, _ in lanes("test-full")} == set(MARKED)


def test_families_and_frameworks_are_those_of_the_records():
    built_in = {name for name, family in registry.families().items() if (ROOT / "patches" / name).is_dir()}
    wanted = {name: {p.framework for p in registry.families()[name].patches} for name in built_in}
    assert {name: set(table) for name, table in TESTED.items()} == wanted


@pytest.mark.parametrize("family", TESTED)
def test_no_version_is_claimed_that_no_lane_runs(family):
    for framework, versions in TESTED[family].items():
        if framework in BESIDE:
            assert BESIDE[framework] in marks(family)
            continue
        assert framework in marks(family), f"no test of {family} is marked {framework}"
        assert {(framework, version) for version in versions} <= lanes("test-full"), (family, framework)


@pytest.mark.parametrize("family", TESTED)
def test_no_version_is_missing_that_make_test_runs(family):
    run = {"vllm": lanes("test-newest"), "verl": lanes("test-paired"), "sglang": lanes("test-sglang")}
    for framework in TESTED[family].keys() & set(MARKED):
        if marks(family)[framework]:
            wanted = {version for mark, version in run[framework] if mark == framework}
            assert wanted <= set(TESTED[family][framework]), (family, framework)


def test_a_patch_for_a_runner_that_no_test_opens_claims_nothing():
    """vLLM's second model runner."""
    eagle = [*(ROOT / "tests" / "patches" / "eagle").rglob("*.py"), *(ROOT / "tests").rglob("test_eagle*.py")]
    opened = [path.name for path in eagle if "VLLM_USE_V2_MODEL_RUNNER" in path.read_text()]
    assert not opened, "state what the second runner's patches were tested on, and drop this test"
    second = [p for f in registry.families().values() for p in f.patches if ".worker.gpu." in p.targets[0]]
    assert second and all(patch.tested == () for patch in second)


@pytest.mark.verl
@pytest.mark.parametrize(
    "family", [name for name, table in TESTED.items() if table.keys() & {"verl", *BESIDE}]
)
def test_what_is_installed_beside_verl_is_what_was_tested(family):
    """Torch too, whose build is not in the Makefile."""
    for patch in registry.families()[family].patches:
        if patch.framework in ("verl", *BESIDE):
            found = examine(patch)
            assert found.problem is None, (patch.id, found.problem)
            assert found.installed.version in patch.tested, (patch.id, found.installed)
