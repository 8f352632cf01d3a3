"""The table of `flashpatch.status`."""

import pytest

from flashpatch import patch_status
from flashpatch.patch_status import PatchStatus, Status, absent_frameworks, is_absent
from flashpatch.record import State


def test_a_framework_that_is_not_installed_takes_one_line() -> None:
    states = {
        "fam.here.run": State("live", "3 calls"),
        "fam.ghost.run": State("skipped", "ghost is not installed"),
        "fam.ghost.stop": State("skipped", "ghost is not installed"),
        "fam.shade.run": State("skipped", "shade is not installed"),
        "fam.here.stop": State("skipped", "no such target"),
    }
    status = Status({name: PatchStatus(name, state) for name, state in states.items()}, ("fam",))
    assert str(status).splitlines() == [
        "flashpatch: fam on",
        "  fam.here.run   live(3 calls)",
        "  fam.here.stop  skipped(no such target)",
        "  ghost: not installed, 2 patches wait",
        "  shade: not installed, 1 patch waits",
    ]
    assert len(status) == 5 and status["fam.ghost.run"].state == states["fam.ghost.run"]
    untested = PatchStatus("fam.here.run", State("installed"), version="here 1.3", tested=False)
    assert str(Status({untested.id: untested})).endswith("  installed  here 1.3 (untested)")


def test_a_session_shows_a_row_per_name() -> None:
    ids = ("fp8.vllm.a", "fp8.vllm.b", "fp8.sglang.a", "grpo.verl.a")
    states = [State("live", "1 call"), State("waiting"), State("skipped", "sglang is not installed")]
    states.append(State("skipped", "verl is not installed"))
    found = {id: PatchStatus(id, state) for id, state in zip(ids, states, strict=True)}
    assert repr(Status(found, ("int8", "grpo"), warnings=("late",))).splitlines() == [
        "flashpatch: int8, grpo on",
        "  warning: late",
        "  int8: 1 live, 1 waiting",
        "  grpo: changes nothing in this Python (more: flashpatch doctor): it waits for verl (none is installed)",
        "  print() shows each patch",
    ]
    many = Status(found, ("int8",) * 12, error="wrong")
    assert len(repr(many).splitlines()) == 10 and "error: wrong" in repr(many)


def test_only_a_skip_for_want_of_the_framework_counts_as_absent() -> None:
    assert is_absent("skipped", "ghost is not installed")
    assert not is_absent("skipped", "needs a.b.c, which is not enabled")
    assert not is_absent("failed", "ghost is not installed")
    assert absent_frameworks([]) == []


@pytest.mark.parametrize(("verl", "lacks"), [(None, "verl"), (object(), "sglang")])
def test_a_patch_for_two_frameworks_waits_for_the_one_that_is_not_there(verl, lacks, monkeypatch) -> None:
    monkeypatch.setattr(patch_status, "find_spec", lambda name: verl)
    found = absent_frameworks(["fp8.verl_sglang.a", "fp8.vllm_lora.b"])
    assert found == [f"{lacks}: not installed, 1 patch waits", "vllm: not installed, 1 patch waits"]
