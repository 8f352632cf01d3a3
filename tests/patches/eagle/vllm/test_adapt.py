"""The real bandit in a real engine, on a clock that makes drafts cost what we say."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.full]


@pytest.fixture(scope="module")
def run(job):
    return job("adapt")


def test_it_speculates_while_it_pays_and_ends_up_disabled_when_it_does_not(run):
    seen, _ = run
    late = {name: numbers[-32:] for name, numbers in seen["recent"].items()}
    assert sum(number == 3 for number in late["exact"]) > 24
    assert sum(number == 0 for number in late["noise still"]) > 24


def test_decisions_and_rewards_are_in_the_ledger(run):
    seen, _ = run
    found = seen["notes"]["eagle_bandit"]
    assert found["steps"] > 100 and found["recent"][-1] in ("disable", "1_1_2", "3_1_4")
    assert any(name.endswith("/disable/pulls") and count > 20 for name, count in found.items())


def test_acceptance_and_choices_over_time_are_in_the_report(run):
    from flashpatch import registry
    from flashpatch.verify.job import collect
    from flashpatch.verify.read_events import Recorded

    _, at = run
    [folder] = (at / "ledger").iterdir()
    found = collect.job(Recorded(folder), registry.patches())
    charts = {chart["id"]: chart for chart in found["charts"]}
    [acceptance] = charts["acceptance"]["lines"]
    assert all(1 <= value <= 4 for _, value in acceptance["points"])
    shares = {line["label"].partition(",")[0]: line["points"][-1][1] for line in charts["arms"]["lines"]}
    assert set(shares) == {"disable", "1_1_2", "3_1_4"} and abs(sum(shares.values()) - 1) < 1e-9
