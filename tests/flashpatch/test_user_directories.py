"""Where files go for a user without a home, as containers with a uid of their own choice have."""

import importlib
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import machine
import pytest

from flashpatch import user_directories
from flashpatch.contracts import verdict_cache
from flashpatch.ledger import files

UID = 54321
MOVES = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "TMPDIR", "TEMP", "TMP")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory for temporary files of all users; pytest's own is for the user who runs the tests."""
    folder = Path(tempfile.mkdtemp(prefix="no-home-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def homeless(monkeypatch, tmp_path) -> Path:
    """This process without a home; the directory for temporary files."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(user_directories, "_warned", False)
    monkeypatch.setattr(user_directories, "_inherited", False)
    for name in (*MOVES, "FLASHPATCH_LEDGER", "FLASHPATCH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(code: str, temporary: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process without the variables that lead to a user's directories."""
    kept = {k: v for k, v in os.environ.items() if k not in MOVES and not k.startswith("FLASHPATCH")}
    env = {**kept, "TMPDIR": str(temporary), **env}
    return machine.run([sys.executable, "-c", code], 60, env=env, cwd=temporary)


BECOME_NOBODY = f"""
import json, logging, os  # this user may not read what a later import needs
import flashpatch.arming.standby, flashpatch.bootstrap
from flashpatch.ledger import row
os.setgroups([])
os.setgid({UID})
os.setuid({UID})
os.environ["FLASHPATCH"] = "fp8"
flashpatch.bootstrap.start()
row.boot()
child = os.fork()
row.touch(now=True)  # both have a row of their own
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("goes on")
"""
is_known = UID in [user.pw_uid for user in pwd.getpwall()]
only_root = pytest.mark.skipif(os.geteuid() != 0 or is_known, reason="only root can become another user")


@only_root
@pytest.mark.parametrize("home", [None, "/", "/nowhere/at/all"])
def test_an_unknown_user_has_a_ledger(temporary, home):
    done = job(BECOME_NOBODY, temporary, **({} if home is None else {"HOME": home}))
    assert done.returncode == 0 and done.stdout == "goes on\n", done.stderr
    [ours] = temporary.iterdir()
    assert ours.name == f"flashpatch-{UID}" and stat.S_IMODE(ours.stat().st_mode) == 0o700
    assert ours.stat().st_uid == UID
    [run] = (ours / "flashpatch" / "ledger").iterdir()
    assert len(list(run.glob("row-*.json"))) == 2
    assert done.stderr.count(str(ours)) == 1 and "XDG_CACHE_HOME" in done.stderr


@only_root
def test_a_worker_that_may_not_write_to_the_jobs_ledger_has_its_own(temporary):
    """A Ray worker in a container gets the ledger directory of a driver elsewhere; here that is root's."""
    drivers = temporary / "driver"
    drivers.mkdir(mode=0o700)
    chosen = {"FLASHPATCH_JOB_LEDGER": str(drivers / "ledger")}
    for also in ({}, {"FLASHPATCH_LEDGER": str(drivers / "ledger")}):
        done = job(BECOME_NOBODY, temporary, **chosen, **also)
        assert done.returncode == 0 and done.stdout == "goes on\n", done.stderr
        [run] = (temporary / f"flashpatch-{UID}" / "flashpatch" / "ledger").iterdir()
        assert len(list(run.glob("row-*.json"))) == 2 and list(drivers.iterdir()) == []
        assert "cannot be written" not in done.stderr
        shutil.rmtree(temporary / f"flashpatch-{UID}")


def test_where_a_ray_worker_writes(homeless, monkeypatch):
    drivers, own = homeless / "driver", homeless / "own"
    monkeypatch.setenv("FLASHPATCH_JOB_LEDGER", str(drivers))
    assert files.directory() == drivers, "with the process that started the job, where it can"
    monkeypatch.setenv("FLASHPATCH_LEDGER", str(drivers))
    assert files.directory() == drivers
    monkeypatch.setenv("FLASHPATCH_LEDGER", str(own))
    assert files.directory() == own, "its node names one"
    monkeypatch.setenv("FLASHPATCH_LEDGER", "/dev/null/ledger")
    assert files.directory() == Path("/dev/null/ledger"), "what the node's user chose is not replaced"
    monkeypatch.setenv("FLASHPATCH_JOB_LEDGER", "/dev/null/ledger")
    assert files.directory() == homeless / f"flashpatch-{os.geteuid()}" / "flashpatch" / "ledger"


def test_a_job_whose_home_cannot_be_written_warns_once(temporary):
    code = "from flashpatch.ledger import row; row.boot()"
    code = f"import subprocess, sys; {code}; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    done = job(code, temporary, HOME="/dev/null/home", FLASHPATCH="fp8")  # not even root can
    assert done.returncode == 0, done.stderr
    [ours] = temporary.iterdir()
    [run] = (ours / "flashpatch" / "ledger").iterdir()
    assert len(list(run.glob("row-*.json"))) == 2
    assert done.stderr.count(str(ours)) == 1, "the first process warns for all"


def test_without_a_home_it_is_the_temporary_directory(homeless, monkeypatch, caplog):
    ours = homeless / f"flashpatch-{os.geteuid()}"
    assert files.directory() == ours / "flashpatch" / "ledger"
    assert verdict_cache.directory() == ours / "flashpatch" / "verdicts"
    assert user_directories.expand("~/bandit.json") == str(ours / "bandit.json")
    assert user_directories.expand("~") == str(ours)
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700
    assert len(caplog.records) == 1, "one warning"
    assert [path.name for path in homeless.iterdir()] == [ours.name], "no directory called ~"
    monkeypatch.setenv("FLASHPATCH_CACHE", "~/verdicts")
    assert verdict_cache.directory() == ours / "verdicts"


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "XDG_STATE_HOME"])
def test_xdg_directories_come_first(homeless, monkeypatch, caplog, name):
    monkeypatch.setenv(name, str(homeless / "mine"))
    assert user_directories.cache_home() == str(homeless / "mine")
    assert not caplog.records


@pytest.mark.parametrize(
    "wrong", ["a link", "others may write to it", pytest.param("somebody else's", marks=only_root)]
)
def test_what_is_no_private_folder_is_refused(homeless, wrong):
    ours = homeless / f"flashpatch-{os.geteuid()}"
    folder = homeless / "elsewhere" if wrong == "a link" else ours
    folder.mkdir()
    folder.chmod(0o770 if wrong == "others may write to it" else 0o700)
    if wrong == "a link":
        ours.symlink_to(folder)
    elif wrong == "somebody else's":
        os.chown(folder, UID, -1)
    with pytest.raises(PermissionError, match="is not a private directory of this user"):
        files.write(files.directory() / "run" / "row.json", {})
    assert list(folder.iterdir()) == []


def test_a_known_user_has_a_home(monkeypatch, tmp_path, caplog):
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_directories.cache_home() == str(tmp_path / ".cache")
    assert user_directories.expand("~/x") == str(tmp_path / "x")
    assert user_directories.expand("x/~") == "x/~" and not caplog.records


@pytest.mark.parametrize("package", ["flashpatch", "flashpatch.patches", "flashpatch.verify"])
def test_nothing_else_looks_for_a_home(package):
    folder = Path(importlib.import_module(package).__file__).parent
    found = [
        path.name
        for path in folder.rglob("*.py")
        if re.search(r"expanduser\(|Path\.home\(|gettempdir\(|getuser\(", path.read_text())
    ]
    assert found == (["user_directories.py"] if package == "flashpatch" else [])
