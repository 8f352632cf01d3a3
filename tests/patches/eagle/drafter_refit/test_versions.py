"""Judge drafter updates on a toy engine, in which the chance of acceptance follows from drafter and policy."""

from collections.abc import Callable

import pytest

from flashpatch.patches.eagle.drafter_refit.acceptance_check import STEPS, AcceptanceCheck, DraftCounts
from flashpatch.patches.eagle.drafter_refit.versions import DrafterVersions, Weights

MAX_DRAFTS = 4


class Engine(DrafterVersions):
    """Loads weights at once, or before the next step if ``late``."""

    def __init__(
        self, accepts: Callable[[int, int], float], tolerance: float = 0.2, late: bool = False
    ) -> None:
        super().__init__(Weights(0, "drafter-0"), AcceptanceCheck(MAX_DRAFTS, tolerance))
        self.accepts, self.late = accepts, late
        self.policy, self.drafting, self.refreshed = 0, 0, 0
        self.pending: Callable[[], None] | None = None
        self.fails = False

    def load(self, weights: Weights, then: Callable[[], None]) -> None:
        def now() -> None:
            self.drafting = weights.version
            then()

        if self.late:
            self.pending = now
        else:
            now()

    def refresh_bandit(self) -> None:
        self.refreshed += 1

    def update(self, version: int) -> None:
        self.pending, self.drafting = None, version
        self.record_update(Weights(version, f"drafter-{version}"))

    def rollout(self, steps: int = 100) -> None:
        for _ in range(steps):
            pending, self.pending = self.pending, None
            if pending is not None:
                self.load_failed() if self.fails else pending()
            self.observe(DraftCounts(1000, round(1000 * self.accepts(self.drafting, self.policy))))

    def rollouts_and_update(self, steps: int) -> None:
        """Roll out, update policy and drafter, roll out so many steps."""
        self.rollout()
        self.move_policy()
        self.update(1)
        self.rollout(steps)

    def move_policy(self) -> None:
        self.policy += 1
        self.policy_updated()

    def events(self) -> list[str]:
        return [f"{entry['event']} {entry['version']}" for entry in self.log]


@pytest.mark.parametrize("late", [False, True])
def test_a_good_drafter_stays_though_the_policy_moved(late: bool) -> None:
    engine = Engine(lambda drafter, policy: 0.75 * 0.6**policy * 1.2**drafter, late=late)
    engine.rollouts_and_update(300)
    assert engine.events() == ["update 1", "doubted 1", "trial 0", "kept 1"]
    doubted, kept = engine.log[1], engine.log[3]
    assert doubted["before"] > 1.25 * doubted["after"], (
        "the policy's move alone costs more than the tolerance"
    )
    assert kept["before"] < kept["after"] == doubted["after"], (
        "on one policy the new drafter is the better one"
    )
    assert engine.version == engine.drafting == engine.good.version == 1 and engine.in_use is engine.current


@pytest.mark.parametrize("late", [False, True])
def test_a_bad_drafter_goes_though_the_policy_moved(late: bool) -> None:
    engine = Engine(lambda drafter, policy: 0.1 if drafter else 0.75 * 0.8**policy, late=late)
    engine.rollouts_and_update(300)
    assert engine.events() == ["update 1", "doubted 1", "trial 0", "worse 1", "rollback 0"]
    assert engine.version == engine.drafting == 0 and engine.check._phase == "idle"


def test_a_bad_drafter_goes_without_a_trial_while_the_policy_stays() -> None:
    engine = Engine(lambda drafter, policy: 0.0 if drafter else 0.75)
    engine.rollout()
    engine.update(1)
    engine.rollout(STEPS)
    assert engine.events() == ["update 1", "worse 1", "rollback 0"]


@pytest.mark.parametrize("late", [False, True])
def test_useless_drafters_are_judged_though_each_runs_for_fewer_steps_than_a_verdict_takes(late: bool):
    engine = Engine(lambda drafter, policy: 0.0 if drafter else 0.75 * 0.95**policy, late=late)
    engine.rollout()
    for version in range(1, 6):
        engine.move_policy()
        engine.update(version)
        engine.rollout(30)
    judged = [event for event in engine.events() if not event.startswith(("update", "trial"))]
    assert judged == ["doubted 3", "worse 5", "rollback 0"] and engine.drafting == 0


def test_what_comes_during_a_trial_is_drafted_with_after_it_and_judged_by_itself() -> None:
    useless = {2}
    engine = Engine(lambda drafter, policy: 0.0 if drafter in useless else 0.75 * 0.6**policy)
    engine.rollouts_and_update(STEPS + 10)
    assert engine.drafting == 0 and engine.version == 1
    engine.update(2)
    assert engine.drafting == 0, "the trial goes on"
    engine.rollout(STEPS)
    assert engine.drafting == 2, "version 1 was right, so its successor gets its turn"
    engine.rollout(3 * STEPS)
    assert engine.drafting == 0 and engine.events()[-1] == "rollback 0"


def test_the_newest_of_several_is_judged_by_its_own_steps() -> None:
    engine = Engine(lambda drafter, policy: 0.0 if drafter == 1 else 0.75)
    engine.rollout()
    engine.update(1)
    engine.rollout(STEPS - 20)
    engine.update(2)
    engine.rollout(40)
    assert engine.events() == ["update 1", "update 2", "kept 2"]


def test_an_update_before_a_rollback_is_judged_by_what_the_rollback_would_have_brought() -> None:
    engine = Engine(lambda drafter, policy: 0.0 if drafter else 0.75, late=True)
    engine.rollout()
    engine.update(1)
    engine.rollout(STEPS)  # condemned, the load is pending
    engine.update(2)
    engine.rollout(300)
    assert engine.drafting == 0 and engine.events()[-1] == "rollback 0"


@pytest.mark.parametrize(
    ("steps", "drafts", "last"), [(STEPS, 1, "unjudged 1"), (2 * STEPS, 0, "rollback 0")]
)
def test_weights_that_cannot_be_loaded_leave_those_in_use(steps: int, drafts: int, last: str) -> None:
    """The first time the old ones fail, for a trial; the second time the new ones, after it."""
    engine = Engine(lambda drafter, policy: 0.75 * 0.6**policy, late=True)
    engine.rollouts_and_update(steps)
    engine.fails = True
    engine.rollout(300)
    assert engine.drafting == drafts and engine.in_use.version == engine.version == drafts
    assert engine.events()[-1] == last and engine.check._phase == "idle"


def test_a_policy_that_moves_at_every_rollout_never_costs_a_good_drafter() -> None:
    engine = Engine(lambda drafter, policy: 0.75 * 0.6 ** abs(policy - drafter))  # less, the further ahead
    engine.rollout()
    for number in range(1, 12):
        engine.move_policy()
        engine.update(number if number != 6 else 1)  # once the trainer goes back to its beginnings
        engine.rollout(150)
    assert [event for event in engine.events() if event.startswith("rollback")] == ["rollback 5"]
