"""Contracts against sources that are not installed, however they are packed."""

import sys
import zipfile
from pathlib import Path

import pytest
from toy_sources import DRIFTED, HOLDS, PATCH, sdist, site, wheel

from flashpatch.verify.against import against


def test_wheels(tmp_path):
    paths = [wheel(tmp_path, "1.0", HOLDS), wheel(tmp_path, "1.2rc1", DRIFTED, "toyfw-cpu")]
    good, bad = against(paths, [PATCH])
    assert (good.of, good.verdict, good.tested) == ("toyfw 1.0", "holds", True)
    assert (bad.of, bad.text, bad.tested) == ("toyfw-cpu 1.2rc1", "drifted(toyfw/engine.py:3)", False)
    assert "no longer takes 'weights' (toyfw/engine.py:3)" in bad.drift
    assert "toyfw" not in sys.modules


@pytest.mark.parametrize("inside", ["", "src", "python"])
def test_sdists_and_unpacked_sdists(tmp_path, inside):
    archive = sdist(tmp_path, "1.1", HOLDS, inside)
    assert [cell.of for cell in against([archive], [PATCH])] == ["toyfw 1.1"]
    assert [cell.of for cell in against([tmp_path / "toyfw-1.1"], [PATCH])] == ["toyfw 1.1"]


def test_site_packages_and_the_package_itself(tmp_path):
    folder = site(tmp_path / "site", "1.3", DRIFTED)
    for path in (folder, folder / "toyfw"):
        assert [(cell.of, cell.verdict) for cell in against([path], [PATCH])] == [("toyfw 1.3", "drifted")]


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
    found = against([checkout(tmp_path, pyproject)], [PATCH])
    assert [(cell.of, cell.verdict) for cell in found] == [(of, "holds")]


def test_archive_members_cannot_leave_the_folder(tmp_path):
    path = tmp_path / "evil.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../escaped.py", "")
        archive.writestr("toyfw/__init__.py", "VERSION = 1")
    against([path], [PATCH])
    assert not list(tmp_path.parent.rglob("escaped.py"))


@pytest.mark.parametrize("name", ["absent", "empty", "text"])
def test_a_path_without_a_framework_is_an_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(ValueError, match=str(tmp_path / name)):
        against([tmp_path / name], [PATCH])
