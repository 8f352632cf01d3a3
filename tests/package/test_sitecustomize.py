"""`flashpatch/sitecustomize` on PYTHONPATH does what the ``.pth`` does, and hides no other sitecustomize."""

from pathlib import Path

import pytest

OURS = "import sys; print(sorted(name for name in sys.modules if name.partition('.')[0] == 'flashpatch'))"
STARTED = "import sys; print('flashpatch.bootstrap' in sys.modules)"
WHERE = "import flashpatch; print(flashpatch.__file__)"


@pytest.fixture(scope="module")
def target(wheel: Path, new_environment, tmp_path_factory) -> Path:
    """What ``pip install --target`` leaves: a directory whose ``.pth`` files nobody reads."""
    folder = tmp_path_factory.mktemp("target")
    new_environment().pip("install", "--no-deps", "--target", folder, wheel)
    return folder


@pytest.fixture(scope="module")
def bare(new_environment):
    return new_environment()


def test_it_starts_flashpatch_from_a_target_directory_if_it_is_on_and_none_is_installed(
    target: Path, bare, installed
) -> None:
    path = str(target / "flashpatch" / "sitecustomize")
    assert bare.python(STARTED, PYTHONPATH=path, FLASHPATCH="fp8") == "True"
    found = bare.python(WHERE, PYTHONPATH=path, FLASHPATCH="fp8")
    assert Path(found).parents[1] == target
    found = installed.python(WHERE, PYTHONPATH=path, FLASHPATCH="fp8")
    assert Path(found).parents[1] == installed.site
    assert bare.python(OURS, PYTHONPATH=path) == "[]"


@pytest.mark.parametrize("env", [{}, {"FLASHPATCH": "fp8"}])
def test_the_users_own_sitecustomize_runs_after_it(env, target: Path, bare, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("mine = True")
    path = f"{target}/flashpatch/sitecustomize:{target}/flashpatch/sitecustomize/:{tmp_path}"
    code = "import sitecustomize; print(sitecustomize.mine, sitecustomize.__file__)"
    assert bare.python(code, PYTHONPATH=path, **env) == f"True {tmp_path}/sitecustomize.py"


def test_two_copies_run_the_users_own_once(target: Path, installed, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    copies = [f"{home}/flashpatch/sitecustomize" for home in (target, installed.site)]
    assert installed.python("", PYTHONPATH=":".join([*copies, str(tmp_path)]), FLASHPATCH="fp8") == "mine"


def test_an_error_in_the_users_own_is_reported_as_without_us(target: Path, bare, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0")
    alone = bare.run("python", "-c", "", PYTHONPATH=str(tmp_path))
    behind = bare.run("python", "-c", "", PYTHONPATH=f"{target}/flashpatch/sitecustomize:{tmp_path}")
    assert "ZeroDivisionError" in alone.stderr
    assert (behind.returncode, behind.stderr) == (alone.returncode, alone.stderr)
