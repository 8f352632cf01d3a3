"""What a controller records of its choices."""

from bandit_lab import ARMS

from flashpatch.patches.eagle.bandit.controller import Controller
from flashpatch.patches.eagle.bandit.policy import Policy


def test_choices_are_counted_by_arm_over_all_batch_sizes() -> None:
    controller = Controller(Policy(ARMS, hold=1))
    chosen: dict[str, int] = {}
    for step in range(300):
        batch = 1 + step % 40
        arm = controller.choose(batch)
        controller.policy.update(batch, arm, batch, 0.01)
        chosen[str(arm)] = chosen.get(str(arm), 0) + 1
    counted = {arm: count for arm, count in controller.policy.pulls().items() if count}
    assert counted == chosen and len(counted) == len(ARMS)


def test_acceptance_is_that_of_the_last_steps() -> None:
    controller = Controller(Policy(ARMS))
    for accepted, length in ((16, 3.0), (0, 1.0)):
        for _ in range(100):
            controller.count_drafts(8, 24, accepted)
        assert controller.acceptance_length == length
