"""Arms as they are written, and what the family's options make of the bandit, and of a drafter's room."""

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.eagle import FAMILY
from flashpatch.patches.eagle.bandit.arm import Arm, parse_arms
from flashpatch.patches.eagle.bandit.buckets import BUCKETS, bucket_of
from flashpatch.patches.eagle.verl.verl_config import DRAFT_TOKENS, draft_tokens


@pytest.mark.parametrize("text", ["3_1_4", "1_1_2", "5_4_16", "8_4_32", "disable"])
def test_an_arm_is_read_and_written_alike(text):
    assert str(Arm.parse(text)) == text


@pytest.mark.parametrize("text", ["", "3_1_4_5", "a_1_2", "0_1_2", "3_1_9", "3_1_3", "-1_1_2", "٣_1_4", None])
def test_a_malformed_arm_is_refused_with_the_way_to_write_it(text):
    with pytest.raises(PatchError, match="arms.*(Write|start|disable)"):
        Arm.parse(text)


def test_lists_are_refused_when_an_arm_is_there_twice():
    assert parse_arms(["3_1_4", "disable"]) == (Arm(3, 1, 4), Arm.DISABLE)
    with pytest.raises(PatchError, match="twice: 3_1_4"):
        parse_arms(["3_1_4", "disable", "3_1_4"])


def test_buckets_follow_the_recorded_graph_sizes():
    sizes = (1, 17, 31, 32, 33, 40, 121, 129, 256, 257, 10**9)
    found = [BUCKETS[bucket_of(size)] for size in sizes]
    assert found == [1, 17, 31, 32, 40, 40, 128, 160, 256, 256, 256]


@pytest.mark.parametrize(
    ("arms", "room"), [([], DRAFT_TOKENS), (["disable", "5_1_6", "2_1_3"], 5), (["disable"], DRAFT_TOKENS)]
)
def test_a_drafter_by_option_has_room_for_the_largest_arm(arms, room):
    defaults = {name: option.default for name, option in FAMILY.options.items()}
    assert draft_tokens(defaults | {"arms": arms}) == room
