"""What a probe called and the ledger did not count is named."""

import pytest
from live_rows import entry, row

from flashpatch.verify.probes import calls, jobs

TAKEN = {"trainer": ("release_server", "generate")}


def said(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, int]) -> tuple[bool, str]:
    """Judge trainers that counted so many calls of each patch."""
    found = [
        row(
            "trainer",
            pid=pid,
            patches={f"grpo.verl.{name}": entry("live" if n else "installed", n) for name, n in one.items()},
        )
        for pid, one in enumerate(rows, 10)
    ]
    monkeypatch.setitem(jobs.given()["taken"], "grpo.verl", TAKEN)
    [proof] = calls.counted(found, "grpo")
    return proof.ok, proof.evidence


def test_calls_in_any_process_of_the_role_count_and_what_is_due_and_was_not_counted_is_named(monkeypatch):
    all_due = {"register_policy_loss": 1, "prepare_micro_batches": 1, "generate": 0, "release_server": 2}
    assert said(monkeypatch, all_due, {"generate": 3}) == (True, "7 calls of 4 patches")
    ok, evidence = said(monkeypatch, {"register_policy_loss": 1, "prepare_micro_batches": 1, "generate": 1})
    assert not ok and evidence == "never called: grpo.verl.release_server by any trainer"
