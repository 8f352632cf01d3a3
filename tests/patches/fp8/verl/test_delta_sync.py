"""verl's own manager under Ray sends differences; what does not follow is refused, and answered in the same call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import cpu_lab
import pytest
import warm
from machine import limit
from tree import SUPPORT

pytestmark = [
    pytest.mark.verl,
    pytest.mark.full,
]  # five processes that import verl; test_delta_versions.py does without

ALL = 8 * 300 * 501 * 2  # bytes


@pytest.fixture(scope="module")
def syncs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("delta")
    config = folder / "flashpatch.toml"
    config.write_text("[fp8]\ndelta_sync = true\n")
    done = warm.run(
        warm.VERL,
        [SUPPORT / "delta_ray.py"],
        env=cpu_lab.environment(folder, FLASHPATCH="cpu,bf16", FLASHPATCH_CONFIG=str(config)),
        cwd=folder,
        timeout=limit(300),
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["said"] = done.stderr + done.stdout
    return found


def test_stock_moves_all_bytes_and_differences_few(syncs: Mapping[str, Any]) -> None:
    for name in ("stock", "stock again"):
        assert syncs[name]["gloo"] == ALL and syncs[name]["share"] is None
    assert syncs["first"]["share"] > 1 and syncs["first"]["gloo"] > ALL
    for name in ("second", "third", "fourth"):
        assert syncs[name]["error"] is None
        assert 0.01 < syncs[name]["share"] < 0.03 and syncs[name]["gloo"] < 0.03 * ALL
        assert 0.008 < syncs[name]["changed"] < 0.012


def test_every_sync_leaves_the_trainers_bytes(syncs: Mapping[str, Any]) -> None:
    right = {name: sync["right"] for name, sync in syncs.items() if name not in ("said", "failed")}
    assert all(all(each) for each in right.values()), right


@pytest.mark.parametrize("name", ["restarted", "passed by", "after it", "joined"])
def test_rollouts_of_several_versions_get_everything_once(syncs: Mapping[str, Any], name: str) -> None:
    assert syncs[name]["error"] is None and syncs[name]["share"] > 1
    assert "not all rollouts hold one version, so all weights are sent" in syncs["said"]


@pytest.mark.parametrize(
    ("name", "before", "said"),
    [
        ("flipped", "passed by", "1 weights differ from the sender's, such as w3"),
        ("changed since", "fourth", "and this copy is of none"),
    ],
)
def test_what_a_rollout_refuses_is_answered_in_the_same_call(
    syncs: Mapping[str, Any], name: str, before: str, said: str
) -> None:
    sync, loads = syncs[name], [new - old for new, old in zip(syncs[name]["loads"], syncs[before]["loads"])]
    assert sync["error"] is None and sync["share"] > 1
    assert loads == [2, 1]  # the one that refused loaded nothing of what it refused
    assert "a rollout refused a difference, so all weights are sent: rollout rank 1" in syncs["said"]
    assert said in syncs["said"]


def test_a_load_that_fails_ends_the_sync_and_the_next_brings_everything(syncs: Mapping[str, Any]) -> None:
    assert "LookupError: cannot place this tensor" in syncs["failed"]["error"]
    assert syncs["after it"]["share"] > 1


def test_a_rollout_that_joins_follows(syncs: Mapping[str, Any]) -> None:
    assert len(syncs["last"]["right"]) == 3 and syncs["last"]["share"] < 0.03
