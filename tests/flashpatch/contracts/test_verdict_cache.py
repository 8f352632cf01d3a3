"""Kept verdicts: used while all that they were derived from is as it was, and never otherwise."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flashpatch.contracts import source, verdict_cache
from flashpatch.contracts.contract import ContractResult
from flashpatch.record import Contract

ENGINE = "from toy.base import Base\nclass Engine(Base):\n    def step(self, batch): ...\n"
BASE = "class Base:\n    def load(self, weights): ...\n"
TOLD_APART = 0.1  # seconds after which a further change of a file shows in its stamp


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLASHPATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Labels of the files that were parsed, in order; a kept verdict parses none."""
    labels: list[str] = []
    real = source._parse

    def parse(path, label, known):
        labels.append(label)
        return real(path, label, known)

    monkeypatch.setattr(source, "_parse", parse)
    return labels


@pytest.fixture
def toy(write, toy_patch, tmp_path):
    """``toy(version="1")`` checks a patch whose verdict needs two files and looks for a third in vain."""
    write(toy={"engine": ENGINE, "base": BASE})
    time.sleep(TOLD_APART)
    patch = toy_patch("toy.newer:f", "toy.engine:Engine.load", params=("weights",))

    def check(version: str = "1", patch=patch, roots: dict[str, Path] | None = None) -> ContractResult:
        found = {"toy": tmp_path / "toy"} if roots is None else roots
        return verdict_cache.check(patch, found.get, version)

    check.patch = patch
    return check


def kept(folder: Path) -> Path:
    [path] = folder.iterdir()
    return path


def test_the_second_check_parses_nothing_and_says_the_same(toy, read, folder):
    first = toy()
    assert first.ok and set(read) == {"toy/engine.py", "toy/base.py"}
    body = json.loads(kept(folder).read_text())["body"]
    assert {Path(path).name for path in body["files"]} == {"engine.py", "base.py"}
    assert {Path(path).name for path in body["absent"]} >= {"newer.py"}
    read.clear()
    assert toy() == first and read == []


def test_a_verdict_against_is_kept_too(toy, read):
    patch = replace(toy.patch, contract=Contract(params=("absent",)))
    first = toy(patch=patch)
    assert not first.ok and "'absent'" in first.drift
    read.clear()
    assert toy(patch=patch) == first and read == []


@pytest.mark.parametrize("keep_times", [False, True])
def test_a_changed_file_of_the_same_size_is_read_again(toy, write, tmp_path, keep_times):
    assert toy().ok
    path = tmp_path / "toy" / "base.py"
    before = path.stat()
    write(toy={"engine": ENGINE, "base": BASE.replace("weights", "wieghts")})
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert not toy().ok


def test_a_file_that_has_come_and_one_that_has_gone_count(toy, write, tmp_path):
    assert toy().target == "toy.engine:Engine.load"
    write(toy={"engine": ENGINE, "base": BASE, "newer": "def f(weights): ...\n"})
    assert toy().target == "toy.newer:f"
    (tmp_path / "toy" / "newer.py").unlink()
    assert toy().target == "toy.engine:Engine.load"
    (tmp_path / "toy" / "base.py").unlink()
    assert not toy().ok


def test_a_package_in_another_place_has_a_verdict_of_its_own(toy, write, tmp_path, read):
    assert toy().ok
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "toy").rename(tmp_path / "elsewhere" / "toy")
    assert not toy(roots={}).ok
    assert toy(roots={"toy": tmp_path / "elsewhere" / "toy"}).ok
    write(toy={"engine": "", "base": BASE})
    assert not toy().ok


@pytest.mark.parametrize(
    "change",
    [
        {"contract": Contract(params=("absent",))},
        {"contract": Contract(mentions=("absent",))},
        {"contract": Contract(exists=("toy.base:absent",))},
        {"targets": ("toy.engine:absent",)},
    ],
    ids=str,
)
def test_a_changed_record_never_gets_the_old_verdict(toy, change):
    assert toy().ok
    assert not toy(patch=replace(toy.patch, **change)).ok
    assert toy().ok


def test_another_version_is_checked_anew(toy, read):
    assert toy("1").ok
    read.clear()
    assert toy("2").ok and read


def test_a_changed_check_never_gets_the_old_verdict(toy, read, tmp_path, monkeypatch):
    assert toy().ok
    read.clear()
    code = tmp_path / "contract.py"
    code.write_text("")
    monkeypatch.setattr(verdict_cache.contract, "__file__", str(code))
    assert toy().ok and read


def test_a_file_that_is_written_right_now_keeps_nothing(toy, write, folder, monkeypatch):
    written = write(toy={"engine": ENGINE, "base": BASE})
    newest = max(path.stat().st_ctime_ns for path in written.rglob("*.py"))
    monkeypatch.setattr(verdict_cache.time, "time_ns", lambda: newest + 1)
    assert toy().ok
    assert not folder.exists()


def test_it_can_be_switched_off(toy, read, folder, monkeypatch):
    assert toy().ok
    monkeypatch.setenv("FLASHPATCH_CACHE", "0")
    read.clear()
    assert toy().ok and read
    assert verdict_cache.directory() is None and len(list(folder.iterdir())) == 1


def lie(path: Path, **changes) -> str:
    """The kept file with a wrong verdict, or other changes, and the sum that goes with it."""
    body = {**json.loads(path.read_text())["body"], "verdict": [False, "", "a lie", ""], **changes}
    return json.dumps({"sum": verdict_cache._digest(json.dumps(body)), "body": body})


DAMAGE = {
    "truncated": lambda path: path.read_text()[:-7],
    "a flipped bit": lambda path: path.read_text().replace("true", "fals", 1),
    "a verdict of wrong types": lambda path: lie(path, verdict=[1, 2, 3, 4]),
    "stamps of a wrong type": lambda path: lie(path, files={"/": "x"}),
    "another key": lambda path: lie(path, key="0"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_not_believed_and_written_over(toy, folder, read, damage):
    honest = toy()
    path = kept(folder)
    path.write_text(damage(path))
    assert toy() == honest
    read.clear()
    assert toy() == honest and read == []


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_believed(toy, folder, mode):
    honest = toy()
    path = kept(folder)
    path.write_text(lie(path))
    path.chmod(mode)
    assert toy() == honest


def test_a_cache_that_cannot_be_written_is_done_without(toy, folder, read):
    folder.write_text("in the way")
    assert toy().ok
    read.clear()
    assert toy().ok and read and folder.read_text() == "in the way"


def test_it_does_not_grow_for_ever(toy, folder, monkeypatch):
    monkeypatch.setattr(verdict_cache, "_MOST", 3)
    for number in range(8):
        assert toy(patch=replace(toy.patch, id=f"test.toy.patch{number}")).ok
        time.sleep(0.01)
    names = sorted(path.name.partition("-")[0] for path in folder.iterdir())
    assert len(names) <= 3 and names[-1] == "test.toy.patch7"
