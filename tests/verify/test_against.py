"""Contracts against sources that are not installed, however they are packed, and the command's exit status."""

import json
import sys
import zipfile
from pathlib import Path

import pytest
from toy_sources import DRIFTED, HOLDS, PATCH, sdist, site, wheel

from flashpatch.verify.against import Cell, survey


def against(paths: list[Path]) -> tuple[Cell, ...]:
    report = survey(paths, [PATCH])
    assert not report.unreadable
    return report.cells


def test_wheels(tmp_path):
    paths = [wheel(tmp_path, "1.0", HOLDS), wheel(tmp_path, "1.2rc1", DRIFTED, "toyfw-cpu")]
    good, bad = against(paths)
    assert (good.of, good.verdict, good.tested) == ("toyfw 1.0", "holds", True)
    assert (bad.of, bad.text, bad.tested) == ("toyfw-cpu 1.2rc1", "drifted(toyfw/engine.py:3)", False)
    assert "no longer takes 'weights' (toyfw/engine.py:3)" in bad.drift
    assert "toyfw" not in sys.modules


@pytest.mark.parametrize("inside", ["", "src", "python"])
def test_sdists_and_unpacked_sdists(tmp_path, inside):
    archive = sdist(tmp_path, "1.1", HOLDS, inside)
    assert [cell.of for cell in against([archive])] == ["toyfw 1.1"]
    assert [cell.of for cell in against([tmp_path / "toyfw-1.1"])] == ["toyfw 1.1"]


def test_site_packages_and_the_package_itself(tmp_path):
    folder = site(tmp_path / "site", "1.3", DRIFTED)
    for path in (folder, folder / "toyfw"):
        assert [(cell.of, cell.verdict) for cell in against([path])] == [("toyfw 1.3", "drifted")]


def checkout(folder: Path, pyproject: str | None = None) -> Path:
    project = folder / "checkout"
    (project / "toyfw").mkdir(parents=True)
    (project / "toyfw" / "__init__.py").write_text("VERSION = 1")
    (project / "toyfw" / "engine.py").write_text(HOLDS)
    (project / "toyfw" / "version").write_text("1.4.dev0\n")
    if pyproject is not None:
        (project / "pyproject.toml").write_text(pyproject)
    return project


DYNAMIC = '[project]\nname = "toyfw"\n[tool.setuptools.dynamic]\nversion = '


@pytest.mark.parametrize(
    ("pyproject", "of"),
    [
        (None, "toyfw unknown"),
        ("[project", "toyfw unknown"),
        ('[project]\nname = "toyfw"\ndynamic = ["version"]', "toyfw unknown"),
        (DYNAMIC + '{file = "toyfw/engine.py"}', "toyfw unknown"),
        (DYNAMIC + '{attr = "toyfw.VERSION"}', "toyfw unknown"),
        ('[project]\nname = "toyfw-cpu"\nversion = "1.5"', "toyfw-cpu 1.5"),
        (DYNAMIC + '{file = "toyfw/version"}', "toyfw 1.4.dev0"),
        (DYNAMIC + '{file = ["toyfw/version"]}', "toyfw 1.4.dev0"),
    ],
)
def test_a_checkout_is_checked_and_may_state_its_version(tmp_path, pyproject, of):
    found = against([checkout(tmp_path, pyproject)])
    assert [(cell.of, cell.verdict) for cell in found] == [(of, "holds")]


def test_archive_members_cannot_leave_the_folder(tmp_path):
    path = tmp_path / "evil.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../escaped.py", "")
        archive.writestr("toyfw/__init__.py", "VERSION = 1")
    against([path])
    assert not list(tmp_path.parent.rglob("escaped.py"))


@pytest.mark.parametrize("name", ["absent", "empty", "text"])
def test_a_path_without_a_framework_is_an_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no archive")
    report = survey([tmp_path / name], [PATCH])
    told, status = (report.empty, 3) if name == "empty" else (report.unreadable, 2)
    assert [path for path, _ in told] == [str(tmp_path / name)] and report.exit_status == status


def test_a_drift_beside_a_path_that_holds_nothing_of_it_is_a_drift(tmp_path):
    bare = tmp_path / "bare.whl"
    with zipfile.ZipFile(bare, "w") as archive:
        archive.writestr("another/__init__.py", "")
    whole, drifts = wheel(tmp_path, "1.0", HOLDS), site(tmp_path / "site", "1.3", DRIFTED)
    assert [survey(paths, [PATCH]).exit_status for paths in ([bare, drifts], [bare, whole])] == [1, 3]


@pytest.mark.parametrize("builds", [(HOLDS, DRIFTED), (DRIFTED, HOLDS)])
def test_two_builds_of_a_version_do_not_hide_a_drift(tmp_path, builds):
    paths = [wheel(tmp_path / str(number), "1.0", source) for number, source in enumerate(builds)]
    assert sorted(cell.verdict for cell in against(paths)) == ["drifted", "holds"]


def damaged(tmp_path, kind):
    """A wheel or sdist of which the second half is missing or overwritten."""
    path = sdist(tmp_path, "3.0", HOLDS) if kind == "sdist" else wheel(tmp_path, "3.0", HOLDS)
    whole = path.read_bytes()
    if kind == "flipped":  # the directory at a zip's end stays: only a member's checksum tells
        at = whole.index(b"class Engine")
        path.write_bytes(whole[:at] + b"CLASS" + whole[at + 5 :])
    else:
        path.write_bytes(whole[: len(whole) // 2])
    return path


@pytest.mark.parametrize("kind", ["cut", "flipped", "sdist"])
def test_a_damaged_archive_is_named_and_stops_no_other(tmp_path, kind):
    bad = damaged(tmp_path, kind)
    report = survey([bad, wheel(tmp_path, "1.0", HOLDS)], [PATCH])
    assert [cell.of for cell in report.cells] == ["toyfw 1.0"]
    [(path, reason)] = report.unreadable
    assert (path, report.exit_status) == (str(bad), 2) and reason


@pytest.mark.parametrize(
    ("parameter", "unreadable", "options", "code"),
    [("policy", 0, [], 0), ("weights", 0, [], 1), ("policy", 1, [], 2), ("weights", 1, ["--json"], 2)],
)
def test_the_exit_status_and_the_formats(verify, tmp_path, parameter, unreadable, options, code):
    """`verify` brings the family ``toy``, whose contract is about ``policy``."""
    source = "class Engine:\n    def update(self, policy): ...\n    def generate(self): ...\n"
    paths = [wheel(tmp_path, "1.0", source.replace("policy", parameter)), wheel(tmp_path, "1.1", source)]
    absent = [tmp_path / "absent.whl"] * unreadable
    done = verify("toy", "--against", *map(str, [*absent, *paths]), *options)
    assert done.returncode == code
    assert ("absent.whl is neither a wheel" in done.stderr) == bool(unreadable)
    if options:
        found = json.loads(done.stdout)
        assert (found["ok"], len(found["cells"]), len(found["unreadable"])) == (False, 4, unreadable)
    else:
        has_drift = parameter == "weights"
        assert ("drifted(toyfw/engine.py:2)" in done.stdout) == has_drift != ("no drift" in done.stdout)
        rows = [line.split()[2:4] for line in done.stdout.splitlines()[-2:]]
        assert rows == [["1", "1"] if has_drift else ["2", "0"], ["2", "0"]]
