"""The bandit's options: FastRL's groups, table and epsilon."""

from __future__ import annotations

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.eagle import FAMILY
from flashpatch.patches.eagle.bandit.options import policy_settings
from flashpatch.patches.eagle.bandit.policy import Policy

ARMS = ["8_4_32", "8_4_16", "8_4_8", "disable"]  # FastRL's
GROUPS = ["1", "4", "20", "21"]
DEFAULTS = {name: option.default for name, option in FAMILY.options.items()}


def _policy(**options) -> Policy:
    return Policy(ARMS, **policy_settings(DEFAULTS | options))


def test_without_options_the_policy_is_the_default_one():
    assert _policy().buckets.edges == Policy(ARMS).buckets.edges
    assert _policy().rule_name == "thompson"


def test_groups_share_what_is_learned():
    policy = _policy(groups=GROUPS, rule="eg", epsilon=0.0)
    assert policy.buckets.edges == (1, 4, 20, 21)
    index = policy.buckets.index
    assert [index(size) for size in (1, 2, 4, 5, 20, 21, 500)] == [0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("epsilon", "low", "high"), [(0.0, 0, 0), (0.5, 250, 450), (1.0, 600, 850)])
def test_epsilon_is_the_share_of_random_choices(epsilon, low, high):
    policy = _policy(rule="eg", epsilon=epsilon)
    others = 0
    for number in range(1100):
        arm = policy.select(4)
        others += number >= 100 and str(arm) != "8_4_16"
        policy.update(4, arm, 16.0 if str(arm) == "8_4_16" else 4.0, 0.01)
    assert low <= others <= high


def test_a_table_says_the_arm_of_each_batch_size():
    policy = _policy(rule="predefined", table=["4:8_4_32", "20: 8_4_16", "64:8_4_8"])
    assert [str(policy.select(size)) for size in (1, 4, 5, 20, 64, 65)] == [
        "8_4_32",
        "8_4_32",
        "8_4_16",
        "8_4_16",
        "8_4_8",
        "disable",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": ["1", "few"]}, "groups has an entry 'few'"),
        ({"groups": ["4", "1"]}, "batch-size buckets are [4, 1]"),
        ({"table": ["8_4_32"], "rule": "predefined"}, "table has an entry '8_4_32'"),
        ({"table": ["4:9_9_9"], "rule": "predefined"}, "4: 9_9_9 does not go with"),
        ({"table": ["4:8_4_32"]}, "does not go with rule thompson"),
    ],
)
def test_bad_entries_are_named(options, words):
    with pytest.raises(PatchError) as raised:
        _policy(**options)
    assert words in str(raised.value)
