"""Record the versions of a drafter, and the acceptance length of each."""

from flashpatch import ledger
from flashpatch.patches.eagle.drafter_refit.acceptance import STEPS, Acceptance
from flashpatch.patches.eagle.drafter_refit.versions import DrafterVersions, Weights


def test_the_acceptance_length_is_of_the_last_steps_whatever_was_drafted() -> None:
    acceptance = Acceptance(max_drafts=3)
    assert acceptance.length == 0.0
    acceptance.add(tried=0, accepted=0)
    assert acceptance.length == 0.0
    for _ in range(STEPS):
        acceptance.add(tried=1, accepted=1)  # of 1 draft each
    assert acceptance.length == 4.0
    for tried, accepted in ((2, 1), (4, 2)) * (STEPS // 2):
        acceptance.add(tried, accepted)
    assert acceptance.length == 1 + 0.5 + 0.25 + 0.125
    acceptance.restart()
    assert acceptance.length == 0.0


def test_an_update_is_in_state_and_ledger_and_refreshes_the_bandit(tmp_path, monkeypatch) -> None:
    noted, told, refreshed = {}, [], []
    monkeypatch.setattr(ledger, "note", lambda **facts: noted.update(facts))
    monkeypatch.setattr(ledger, "event", lambda kind, **facts: told.append((kind, facts)))
    versions = DrafterVersions("own", Acceptance(2), lambda: refreshed.append(1))
    assert versions.state() == {"drafter": 0, "drafter_path": "own", "acceptance": 0.0} and not noted
    for version in range(1, 11):
        versions.acceptance.add(2, 2)
        versions.record_update(Weights(version, f"/{version}"))
    assert versions.state() == {"drafter": 10, "drafter_path": "/10", "acceptance": 0.0}
    entry = {"version": 10, "path": "/10", "before": 3.0}
    assert told[-1] == ("drafter", entry) and len(told) == len(refreshed) == 10
    log = noted["eagle_drafter"]["log"]
    assert noted["eagle_drafter"] == {"version": 10, "path": "/10", "log": log}
    assert [one["version"] for one in log] == [*range(3, 11)] and log[-1] == entry
