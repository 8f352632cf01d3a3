"""What a controller records of its choices, and the file that keeps what a bandit learned."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from bandit_lab import ARMS, Engine, drive

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.bandit import controller
from flashpatch.patches.eagle.bandit.policy import Policy


def test_what_was_learned_comes_back(tmp_path):
    path, first, second = tmp_path / "new" / "bandit.json", Policy(ARMS), Policy(ARMS)
    assert controller.restore(first, path) == "new"
    drive(first, Engine(0.5), 50)
    controller.Controller(first, path).save()
    assert controller.restore(second, path) == "restored"
    assert second.state() == first.state()
    assert [file.name for file in path.parent.iterdir()] == ["bandit.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", json.dumps({**Policy(ARMS).state(), "format": 1}), b"\xff\xfe"]
)
def test_a_file_that_does_not_fit_is_logged_and_left_alone(tmp_path, caplog, text):
    path, policy = tmp_path / "bandit.json", Policy(ARMS)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before, content = policy.state(), path.read_bytes()
    assert controller.restore(policy, path).startswith("not restored: ")
    assert "starts with nothing learned" in caplog.text and policy.state() == before
    assert path.read_bytes() == content


def _numbers(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every number in a state's JSON."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _numbers(part, (*path, key))
    if type(value) in (int, float):
        yield path


@pytest.mark.parametrize("rule", ["thompson", "eg", "ucb1"])
def test_a_damaged_number_is_noticed_when_it_is_read_and_never_raises_in_a_step(tmp_path, rule):
    """Damage each number in turn: the state is refused, or it works."""
    learned, path = Policy(ARMS, rule=rule), tmp_path / "bandit.json"
    drive(learned, Engine(0.5), 40)
    saved, refused = json.dumps(learned.state()), 0
    for place in _numbers(json.loads(saved)):
        if place[0] in ("format", "window") or any(type(key) is int and key > 1 for key in place):
            continue
        for damage in (float("nan"), "7", None, -1e300):
            state = json.loads(saved)
            inner = state
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = damage
            path.write_text(json.dumps(state))
            policy = Policy(ARMS, rule=rule)
            if controller.restore(policy, path) == "restored":
                for batch in (1, 7, 300):
                    policy.update(batch, policy.select(batch), batch, 0.01)
            else:
                refused += 1
                assert policy.state() == Policy(ARMS, rule=rule).state(), place
    assert refused > 50


def test_what_a_later_step_would_fail_on_is_refused():
    learned = Policy(ARMS, rule="eg")
    drive(learned, Engine(0.5), 40)
    state = json.loads(json.dumps(learned.state()))
    steps = max((window["steps"] for window in state["learned"]["windows"].values()), key=len)
    steps[0][2] = 0.0  # seconds
    for damaged in (state, {**learned.state(), "best": []}):
        with pytest.raises(PatchError, match="is damaged"):
            Policy(ARMS, rule="eg").restore(damaged)


def test_a_full_disk_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    controller.Controller(Policy(ARMS), tmp_path / "file" / "bandit.json").save()
    assert "cannot be saved" in caplog.text


def test_choices_are_counted_by_arm_over_all_batch_sizes() -> None:
    ours = controller.Controller(Policy(ARMS, hold=1))
    chosen: dict[str, int] = {}
    for step in range(300):
        batch = 1 + step % 40
        arm = ours.choose(batch)
        ours.policy.update(batch, arm, batch, 0.01)
        chosen[str(arm)] = chosen.get(str(arm), 0) + 1
    counted = {arm: count for arm, count in ours.policy.pulls().items() if count}
    assert counted == chosen and len(counted) == len(ARMS)


def test_acceptance_is_that_of_the_last_steps() -> None:
    ours = controller.Controller(Policy(ARMS))
    for accepted, length in ((16, 3.0), (0, 1.0)):
        for _ in range(100):
            ours.count_drafts(8, 24, accepted)
        assert ours.acceptance_length == length
