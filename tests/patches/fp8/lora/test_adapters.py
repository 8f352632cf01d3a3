"""The transaction of one rank, and its agreement with others, without an engine."""

from typing import Any

import pytest

pytest.importorskip("torch")

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.lora.adapters import Adapters
from flashpatch.patches.fp8.update.ranks import SingleRank


class OtherRank(SingleRank):
    """A second rank that says so in each agreement."""

    def __init__(self, *said: str | None) -> None:
        self.said, self.heard = list(said), []

    def agree_on_commit(self, error: str | None, empty: bool = False) -> tuple[str | None, bool]:
        self.heard.append(error)
        return error or self.said.pop(0), empty


def replace(adapters: Adapters, digest: str, key: str = "policy", place: Any = None) -> list[str]:
    """Replace adapter 1; return what was done."""
    done = []

    def put() -> None:
        done.append("place")
        if place is not None:
            place()

    def stage() -> str:
        done.append("stage")
        return digest

    try:
        adapters.replace((key, 1, "", key), stage, put, lambda: done.append("restore"))
    except Exception as error:
        done.append(type(error).__name__)
    return done


def fail() -> None:
    raise OSError("gone")


def test_versions_count_commits_and_meanings_what_else_a_number_or_a_name_stands_for():
    adapters = Adapters(SingleRank())
    seen = []
    for digest, key in (("a", "policy"), ("a", "policy"), ("b", "policy"), ("b", "other"), ("a", "policy")):
        assert replace(adapters, digest, key) == ["stage", "place"]
        seen.append((adapters.version, adapters.policy().version))
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3)]


def test_content_is_remembered_when_the_adapter_is_gone():
    adapters = Adapters(SingleRank())
    replace(adapters, "a")
    adapters.keep_only(())
    assert not adapters.held
    replace(adapters, "b")
    assert adapters.meanings == 1 and adapters.held[1].digest == "b"


def test_what_fails_on_one_rank_is_taken_back_on_all():
    adapters = Adapters(OtherRank("rank 1: OSError: gone"))
    assert replace(adapters, "a") == ["stage", "PatchError"]
    assert adapters.version == 0 and not adapters.held
    adapters = Adapters(OtherRank(None, "rank 1: OSError: gone"))
    assert replace(adapters, "a") == ["stage", "place", "restore", "PatchError"]
    assert adapters.version == 0 and adapters.policy().state == "ready"
    other = OtherRank(None, None)
    adapters = Adapters(other)
    assert replace(adapters, "a", place=fail) == ["stage", "place", "restore", "OSError"]
    assert other.heard == [None, "OSError: gone"]


def test_what_cannot_be_taken_back_stops_the_engine_until_an_adapter_is_whole():
    adapters = Adapters(SingleRank())
    with pytest.raises(OSError):
        adapters.replace(("policy", 1, "", "policy"), lambda: "a", fail, fail)
    assert adapters.policy().state == "broken" and "taken back" in adapters.policy().why_refused()
    replace(adapters, "a")
    assert adapters.policy().state == "ready"


def test_a_request_never_changes_what_a_name_means():
    adapters = Adapters(SingleRank())
    replace(adapters, "a")
    adapters.check_meaning("policy", "a")
    adapters.check_meaning("new", "b")
    with pytest.raises(PatchError, match="Send it by add_lora"):
        adapters.check_meaning("policy", "b")


def test_of_two_numbers_that_caches_take_for_one_the_last_sent_serves():
    adapters = Adapters(SingleRank())
    for number, digest in ((1, "a"), (2, "a"), (2, "b")):
        adapters.replace(("policy", number, "path", "key"), lambda: digest, lambda: None, lambda: None)
    assert adapters.policy().holds == {1: None, 2: ("policy", "path")}
    adapters.replace(("policy", 1, "path", "key"), lambda: "b", lambda: None, lambda: None)
    assert adapters.policy().holds == {1: ("policy", "path"), 2: ("policy", "path")}
    assert adapters.policy().version == 2
