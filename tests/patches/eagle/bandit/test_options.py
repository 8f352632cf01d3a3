"""What the family's options make of the bandit, and of a drafter's room."""

import pytest

from flashpatch.patches.eagle import FAMILY
from flashpatch.patches.eagle.bandit.policy import Policy, policy_settings
from flashpatch.patches.eagle.verl.verl_config import DRAFT_TOKENS, draft_tokens

ARMS = ["8_4_32", "8_4_16", "8_4_8", "disable"]  # FastRL's
DEFAULTS = {name: option.default for name, option in FAMILY.options.items()}


def _policy(**options) -> Policy:
    return Policy(ARMS, **policy_settings(DEFAULTS | options))


def test_rule_and_guard_are_the_options_or_the_defaults():
    assert (_policy().rule_name, _policy().guard) == ("thompson", Policy(ARMS).guard)
    assert (_policy(rule="ucb1").rule_name, _policy(guard=9).guard) == ("ucb1", 9)


@pytest.mark.parametrize(
    ("arms", "room"), [([], DRAFT_TOKENS), (["disable", "5_1_6", "2_1_3"], 5), (["disable"], DRAFT_TOKENS)]
)
def test_a_drafter_by_option_has_room_for_the_largest_arm(arms, room):
    assert draft_tokens(DEFAULTS | {"arms": arms}) == room
