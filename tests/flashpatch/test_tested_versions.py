"""Versions that patches were tested on: from the record, or from one file when somebody asks."""

import dataclasses
import sys

import machine
import pytest

from flashpatch import record as records
from flashpatch.record import Patch


def record(patch_id: str = "fp8.vllm.step", **fields) -> Patch:
    common = dict(targets=("toyfw:step",), requires="", why="", how="", remove_when="", wrapper=print)
    return Patch(patch_id, **common, **fields)


def test_what_the_record_gives_goes_before_the_versions_of_its_family_and_framework() -> None:
    known = {name: tuple(found) for name, found in records._tested_versions()["fp8"].items()}
    assert record().tested == known["vllm"] != ()
    assert record("fp8.verl.step").tested == known["verl"] != record().tested
    assert record(tested=("1.0",)).tested == ("1.0",) and record(tested=()).tested == ()
    assert dataclasses.replace(record(), tested=("1.0",)).tested == ("1.0",)


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("2.11.0", True),
        ("2.11.0+cpu", True),
        ("2.11.0+cu130", True),
        ("2.11.0.dev1+cpu", False),
        ("2.11", False),
    ],
)
def test_a_local_label_is_a_build_of_the_same_version(version: str, is_tested: bool) -> None:
    assert record(tested=("2.11.0",)).tested_on(version) is is_tested


@pytest.mark.parametrize("patch_id", ["acme.vllm.step", "fp8.acme.step"])
def test_a_family_or_framework_that_the_file_does_not_know(patch_id: str) -> None:
    assert record(patch_id).tested == ()


def test_the_file_is_read_when_versions_are_asked_for() -> None:
    code = (
        "from flashpatch import record as records\nfrom flashpatch.patches.fp8 import FAMILY\nassert "
        "records._tested_versions.cache_info().currsize == 0\nassert any(patch.tested for patch in FAMILY.patches)\nassert "
        "records._tested_versions.cache_info().misses == 1\n"
    )
    done = machine.run([sys.executable, "-c", code], 120)
    assert done.returncode == 0, done.stderr
