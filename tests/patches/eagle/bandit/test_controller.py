"""What a controller records of its choices."""

from bandit_lab import ARMS

from flashpatch.patches.eagle.bandit import controller
from flashpatch.patches.eagle.bandit.policy import Policy


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
