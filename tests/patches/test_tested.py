"""The versions in ``patches/tested.toml`` are those that the Makefile's lanes run a family's tests on."""

import functools
import re
import tomllib
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from flashpatch import registry
from flashpatch.arming.preflight import examine, other_generation
from flashpatch.contracts.versions import satisfies

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TESTED = tomllib.loads((ROOT / "patches" / "tested.toml").read_text())
MARKED = ("vllm", "verl", "sglang", "trainer")
TRAINERS = dict(trl="trl", swift="ms-swift", openrlhf="openrlhf", checkpoint_engine="checkpoint-engine")
"""Framework of a patch id to the distribution that the lane of trainers installs."""


@functools.cache
def lanes(target: str) -> set[tuple[str, str, str]]:
    """What a Makefile target runs tests on: mark, framework, and that framework's version in the same environment."""
    vllm = dict(re.findall(r"^\$\((\w+)\)/\.vllm: VLLM := (\S+)$", MAKEFILE, re.M))
    [torch] = re.findall(r"^TORCH := torch==(\S+)$", MAKEFILE, re.M)
    torches = dict(re.findall(r"^\$\((\w+)\)/\.vllm: TORCH := torch==(\S+)$", MAKEFILE, re.M))
    [verl] = set(re.findall(r"install .* verl==(\S+)", MAKEFILE))
    sglang = dict(re.findall(r"^\$\((\w+)\)/\.sglang: PACKAGES := sglang==(\S+)", MAKEFILE, re.M))
    trainers = {name: re.findall(rf"install .* {dist}==(\S+)", MAKEFILE) for name, dist in TRAINERS.items()}
    [recipe] = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    found = set()
    for environment, quoted, word in re.findall(r"\$\((\w+)\)/bin/pytest -m (?:\"(.+?)\"|(\w+))", recipe):
        there = {"torch": torches.get(environment, torch), "vllm": vllm.get(environment)}
        there |= {"vllm_0_24": "0.24.0"} if there["vllm"] == "0.24.0" else {}
        there["vllm_lora"] = there["vllm"]
        has_verl = f"$({environment})/.ready: $({environment})/.verl" in MAKEFILE
        there |= {"verl": verl, "verl_0_9": verl, "verl_vllm": verl} if has_verl else {}
        if environment in sglang:
            version = sglang[environment]
            there |= {"verl": verl, "verl_0_9": verl, "sglang": version, "sglang_lora": version}
            old = "_0_5_12" if Version(version) < Version("0.5.21") else ""  # a generation of their own
            there |= {f"verl_sglang{old}": verl, f"sglang{old}": version}
        there |= {name: version for name, [version] in trainers.items()} if environment == "TRAINERS" else {}
        here = {m for m in MARKED if there.get(m)} | ({"trainer"} if environment == "TRAINERS" else set())
        asked = quoted or word
        # An expression such as "sglang and not verl" asks for sglang.
        selected = [m for m in MARKED if "full or" in asked or re.search(rf"(?<!not )\b{m}\b", asked)]
        found |= {(m, f, v) for m in selected if m in here for f, v in there.items() if v}
    return found


@functools.cache
def marks(family: str) -> dict[str, bool]:
    """Marks of a family's tests and probes; whether one of their tests is not only for the long lanes."""
    files = [*(ROOT / "tests" / "patches" / family).rglob("test_*.py")]
    files += (ROOT / "tests" / "verify" / "probes").glob(f"test_{family}*.py")
    found: dict[str, bool] = {}
    for text in map(Path.read_text, files):
        whole_file_is_long = bool(re.search(r"^pytestmark = .*mark\.full", text, re.M))
        for mark in set(re.findall(r"mark\.(vllm|verl|sglang|trainer)\b", text)):
            found[mark] = found.get(mark, False) or not whole_file_is_long
    return found


def test_families_and_frameworks_are_those_of_the_records():
    built_in = {name for name, family in registry.families().items() if (ROOT / "patches" / name).is_dir()}
    wanted = {name: {p.framework for p in registry.families()[name].patches} for name in built_in}
    assert {name: set(table) for name, table in TESTED.items()} == wanted


@pytest.mark.parametrize("family", TESTED)
def test_no_version_is_claimed_that_no_lane_runs(family):
    for framework, versions in TESTED[family].items():
        run = {(name, version) for mark, name, version in lanes("test-full") if mark in marks(family)}
        for version in versions:
            assert (framework, version) in run, (family, framework, version)


@pytest.mark.parametrize("family", TESTED)
def test_no_version_is_missing_that_make_test_runs(family):
    """Where no test has the framework's own mark, those of another run its patches, as verl's do torch's."""
    run = lanes("test-newest") | lanes("test-paired") | lanes("test-sglang") | lanes("test-sglang-paired")
    short = {mark for mark, is_short in marks(family).items() if is_short}
    for framework, versions in TESTED[family].items():
        relevant = {framework} & short or short
        wanted = {version for mark, name, version in run if name == framework and mark in relevant}
        asked = [p.requires for p in registry.families()[family].patches if p.framework == framework]
        wanted = {
            version
            for version in wanted
            if all(satisfies(one, version) for one in asked if _is_of(one, framework))
        }
        assert wanted <= set(versions), (family, framework)


@pytest.mark.parametrize("family", TESTED)
def test_no_patch_keeps_its_group_from_a_tested_version(family):
    """One whose version does not fit takes the others of its group along: it belongs into a group of its own."""
    for patch in registry.families()[family].patches:
        if _is_of(patch.requires, patch.framework):
            tested = TESTED[family][patch.framework]
            assert [one for one in tested if not satisfies(patch.requires, one)] == [], patch.id


@pytest.mark.parametrize("family", TESTED)
def test_a_group_without_another_generation_is_for_every_version_of_its_framework(family):
    """Where a group does not fit and no other generation stands in for it, it is refused, and the family with it."""
    patches = registry.families()[family].patches
    frameworks: dict[str, set[str]] = {}
    for patch in patches:
        frameworks.setdefault(patch.base_framework, set()).add(patch.framework)
    for patch in patches:
        if len(frameworks[patch.base_framework]) == 1:
            package = re.split(r"[<>=!~ ]", patch.requires)[0]
            tested = TESTED[family].get(package, [])
            assert [one for one in tested if not satisfies(patch.requires, one)] == [], patch.id


def test_engines_of_cpu_are_those_that_run_beside_verl():
    """`flashpatch doctor` names them to who has another engine."""
    vllm = dict(re.findall(r"^\$\((\w+)\)/\.vllm: VLLM := (\S+)$", MAKEFILE, re.M))
    sglang = dict(re.findall(r"^\$\((\w+)\)/\.sglang: PACKAGES := sglang==(\S+)", MAKEFILE, re.M))
    beside = {vllm[one] for one in vllm if f"$({one})/.ready: $({one})/.verl" in MAKEFILE}
    assert {*TESTED["cpu"]["vllm"]} == beside and {*TESTED["cpu"]["sglang"]} == {*sglang.values()}


def test_patches_for_the_second_runner_claim_what_its_tests_run_on():
    """Those tests run by their marks: on the newest vLLM in ``make test``, on every other in ``make test-full``."""
    second = [p for f in registry.families().values() for p in f.patches if ".worker.gpu." in p.targets[0]]
    assert {patch.id.partition(".")[0] for patch in second} == {"eagle", "fp8"}
    run = {version for mark, name, version in lanes("test-full") if mark == name == "vllm"}
    for patch in second:
        family, framework, _ = patch.id.split(".")
        files = [*(ROOT / "tests" / "patches" / family).rglob("test_second_runner*.py")]
        opening = [path for path in files if "environment.V2" in path.read_text()]
        short = [
            path for path in opening if not re.search(r"^pytestmark = .*mark\.full", path.read_text(), re.M)
        ]
        assert short, f"no test opens the second runner for {patch.id}"
        assert all(re.search(r"^pytestmark = .*mark\.vllm", path.read_text(), re.M) for path in short)
        assert set(patch.tested) <= run
        assert list(patch.tested) == TESTED[family][framework]


def _is_of(requirement: str, framework: str) -> bool:
    """Whether a requirement is on the framework whose versions the table has."""
    return re.match(r"[\w-]+", requirement).group() == framework.partition("_")[0]


#: Groups whose frameworks an environment with verl has not.
SGLANG = {"sglang", "sglang_lora", "verl_sglang", "sglang_0_5_12", "verl_sglang_0_5_12"}
ABSENT = SGLANG if find_spec("sglang") is None else {"vllm", "vllm_0_24", "vllm_lora", "verl_vllm"}
ABSENT |= {*TRAINERS, "prime_rl"}


@pytest.mark.verl
@pytest.mark.parametrize("family", [name for name, table in TESTED.items() if "verl" in table])
def test_what_is_installed_beside_verl_is_what_was_tested(family):
    patches = registry.families()[family].patches
    for patch in patches:
        if patch.framework not in ABSENT and patch.tested and not other_generation(patches, patch.framework):
            found = examine(patch)
            assert found.problem is None, (patch.id, found.problem)
            assert patch.tested_on(found.installed.version), (patch.id, found.installed)


@pytest.mark.verl
def test_what_is_for_old_versions_alone_goes_when_verl_pins_a_newer_one():
    asked = [Requirement(one) for one in requires("verl")]
    pins = {it.name: str(it.specifier).removeprefix("==") for it in asked if it.name in ("vllm", "sglang")}
    old = [patch for one in registry.families().values() for patch in one.patches if "<" in patch.requires]
    needless = [one.id for one in old if not satisfies(one.requires, pins[re.match(r"\w+", one.requires)[0]])]
    assert old and needless == []
    for patch in old:
        file = ROOT / "patches" / Path(*patch.id.split(".")[:2])
        text = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
        assert "It goes when verl" in text.partition("\n")[0], file


@pytest.mark.parametrize("family", TESTED)
def test_patches_of_a_group_are_for_the_same_versions(family):
    """Where one of them is not for the installed version, none of the group is applied."""
    asked: dict[tuple[str, str], set[str]] = {}
    for patch in registry.families()[family].patches:
        distribution = re.match(r"[\w-]+", patch.requires).group()
        asked.setdefault((patch.framework, distribution), set()).add(patch.requires)
    assert {group: wanted for group, wanted in asked.items() if len(wanted) > 1} == {}
