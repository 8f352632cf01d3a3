"""Lines of Python by room, against the table of `lines.toml`, which may only fall."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from tree import TREE as ROOT

TABLE = tomllib.loads(Path(__file__).with_name("lines.toml").read_text())
SLACK = 200  # lines below the table after which it has to be lowered


def lines(room: str) -> int:
    """Lines of the files of a room that git knows; in an archive, of all."""
    listed = subprocess.run(["git", "ls-files", f"{room}/*.py"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() if listed.returncode == 0 else Path(ROOT, room).rglob("*.py")
    return sum(len(Path(ROOT, name).read_text().splitlines()) for name in names if Path(ROOT, name).exists())


@pytest.mark.parametrize("room", TABLE)
def test_a_room_holds_no_more_than_its_budget(room: str) -> None:
    counted = lines(room)
    assert counted <= TABLE[room], (
        f"{room} has {counted} lines: take out what the change makes needless; the table may only fall"
    )
    assert counted > TABLE[room] - SLACK, f"{room} has {counted} lines: lower the table of lines.toml"
