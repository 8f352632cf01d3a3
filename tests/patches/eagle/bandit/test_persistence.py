"""The file that keeps what a bandit learned."""

from __future__ import annotations

import json

import pytest
from bandit_lab import ARMS, Engine, drive

from flashpatch.patches.eagle.bandit import persistence
from flashpatch.patches.eagle.bandit.policy import Policy


def test_what_was_learned_comes_back(tmp_path):
    path, first, second = tmp_path / "new" / "bandit.json", Policy(ARMS), Policy(ARMS)
    assert persistence.restore(first, path) == "new"
    drive(first, Engine(0.5), 50)
    persistence.save(first, path)
    assert persistence.restore(second, path) == "restored"
    assert second.state() == first.state()
    assert [file.name for file in path.parent.iterdir()] == ["bandit.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", json.dumps({**Policy(ARMS).state(), "format": 1}), b"\xff\xfe"]
)
def test_a_file_that_does_not_fit_is_logged_and_left_alone(tmp_path, caplog, text):
    path, policy = tmp_path / "bandit.json", Policy(ARMS)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before, content = policy.state(), path.read_bytes()
    assert persistence.restore(policy, path).startswith("not restored: ")
    assert (
        "starts with nothing learned" in caplog.text
        and policy.state() == before
        and path.read_bytes() == content
    )


def test_a_full_disk_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    persistence.save(Policy(ARMS), tmp_path / "file" / "bandit.json")
    assert "cannot be saved" in caplog.text
