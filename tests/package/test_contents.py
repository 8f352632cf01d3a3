"""Every kind of install carries what the tree holds: no more, no less, and under one import name."""

import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOMS = {"flashpatch": "flashpatch", "patches": "flashpatch/patches", "verify": "flashpatch/verify"}
FRONT_DOORS = {"flashpatch.pth", "flashpatch.start"}
CONSOLE_SCRIPTS = {"flashpatch", "flashpatch-verify"}


def sources(tree: Path, *tops: str) -> set[str]:
    """Files below ``tops``, relative to the tree, without what builds and interpreters leave behind."""
    found = (path.relative_to(tree) for top in tops for path in (tree / top).rglob("*") if path.is_file())
    left_behind = {"__pycache__", "flashpatch.egg-info", "build"}
    return {str(path) for path in found if not left_behind & set(path.parts)}


def as_installed(path: str) -> str:
    room, _, rest = path.partition("/")
    return f"{ROOMS[room]}/{rest}"


def test_the_wheel_holds_rooms_and_doors_and_the_sdist_the_tree(tree: Path, wheel: Path, dist: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {as_installed(path) for path in sources(tree, *ROOMS)} | FRONT_DOORS
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    held = {path for path in held if path != "PKG-INFO" and not path.startswith("flashpatch.egg-info/")}
    assert held == sources(tree, ".") - {".gitignore"}


def test_the_editable_install_maps_every_module_to_the_tree(tree: Path, editable) -> None:
    modules = {
        as_installed(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): str(tree / path)
        for path in sources(tree, *ROOMS)
        if path.endswith(".py") and "sitecustomize" not in path
    }
    code = f"""
from importlib.util import find_spec
for name, path in {modules!r}.items():
    found = find_spec(name).origin
    assert found == path, (name, found)
"""
    assert editable.python(code) == ""


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_site_packages_gain_one_import_name_and_the_front_doors(kind: str, request) -> None:
    added = request.getfixturevalue(kind).added
    assert added >= FRONT_DOORS
    finder = {name for name in added if name.startswith("__editable__")}
    assert added - FRONT_DOORS - finder == ({"flashpatch"} if kind == "installed" else set())


def test_pip_install_from_the_tree_equals_the_wheel(tree: Path, installed, new_environment) -> None:
    environment = new_environment()
    environment.pip("install", "--no-deps", "--no-build-isolation", tree)
    assert environment.added == installed.added
    assert sources(environment.site, "flashpatch") == sources(installed.site, "flashpatch")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_uninstall_removes_everything(kind: str, wheel: Path, tree: Path, new_environment) -> None:
    environment = new_environment()
    what = [wheel] if kind == "wheel" else ["-e", tree]
    environment.pip("install", "--no-deps", "--no-build-isolation", *what)
    scripts = {path.name for path in (environment.home / "bin").iterdir()}
    assert environment.added and scripts >= CONSOLE_SCRIPTS
    environment.pip("uninstall", "-y", "flashpatch")
    assert environment.added == set()
    assert not CONSOLE_SCRIPTS & {path.name for path in (environment.home / "bin").iterdir()}
