"""What is wrong with an adapter's tensors, and which content they are."""

import pytest
import torch

from flashpatch.patches.fp8.lora import check
from flashpatch.patches.fp8.lora.check import Pair, Place

CONFIG = {"r": 2, "lora_alpha": 6}
PLACES = {"q_proj": Place(8, 4), "odd": None}


def problems(pairs, places, config) -> list[str]:
    return check.problems(pairs, check.read(pairs)[0], places, config)


def digest(pairs) -> str:
    return check.digest(pairs, check.read(pairs)[1])


def pair(a=(2, 8), b=(4, 2), scaling=3.0) -> Pair:
    return Pair(torch.ones(a), torch.ones(b), scaling)


@pytest.mark.parametrize(
    ("pairs", "config", "named"),
    [
        ({}, {}, "it has no tensors"),
        ({"q_proj": pair(), "k_proj": pair()}, {}, "the engine has no place for k_proj"),
        (
            {"q_proj": pair(a=(2, 7))},
            {},
            "q_proj: lora_A is [2, 7] and lora_B [4, 2], but the weight is [4, 8]",
        ),
        ({"q_proj": pair(b=(3, 2))}, {}, "the weight is [4, 8]"),
        ({"q_proj": pair((1, 8), (4, 1))}, {}, "but r=2"),
        ({"q_proj": pair(a=(16,))}, {}, "not two matrices"),
        ({"q_proj": Pair(None, torch.ones(4, 2), 3.0)}, {}, "q_proj: lora_A did not come"),
        ({"q_proj": Pair(torch.ones(2, 8), None, 3.0)}, {}, "q_proj: lora_B did not come"),
        ({"q_proj": pair(scaling=9.0)}, {}, "the engine scales by 9, lora_alpha and r say 3"),
        ({"q_proj": pair(scaling=1.0)}, {}, "the engine scales by 1"),
        (
            {"q_proj": Pair(torch.full((2, 8), torch.inf), torch.ones(4, 2), 3.0)},
            {},
            "q_proj: holds NaN or infinity",
        ),
        (
            {
                "odd": pair((2, 5), (7, 2)),
                "q_proj": Pair(torch.ones(2, 8), torch.full((4, 2), torch.nan), 3.0),
            },
            {},
            "q_proj: holds NaN or infinity",
        ),
        ({"q_proj": pair()}, {"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4} is not followed"),
        ({"q_proj": pair()}, {"use_dora": True}, "use_dora=True is not followed"),
        ({"q_proj": pair()}, {"of_a_later_peft": True}, "of_a_later_peft=True is not followed"),
        ({"q_proj": pair()}, {"init_lora_weights": "lora_ga"}, "changes the base too"),
    ],
)
def test_each_problem_is_named(pairs, config, named):
    (found,) = problems(pairs, PLACES, {**CONFIG, **config})
    assert named in found


def test_large_finite_values_are_no_infinity():
    large = torch.full((2, 8), 3e38)
    assert problems({"q_proj": Pair(large, torch.ones(4, 2), 3.0)}, PLACES, CONFIG) == []


def test_the_digest_is_of_the_content():
    one = {"q_proj": pair(), "odd": pair()}
    same = {"odd": pair(), "q_proj": pair()}
    assert digest(one) == digest(same)
    others = [
        {"q_proj": pair(), "even": pair()},
        {"q_proj": pair(scaling=2.0), "odd": pair()},
        {"q_proj": pair((2, 4), (8, 2)), "odd": pair()},
        {"q_proj": Pair(torch.ones(2, 8).double(), torch.ones(4, 2), 3.0), "odd": pair()},
    ]
    changed = torch.ones(2, 8)
    changed[1, 7] += 1e-6
    others.append({"q_proj": Pair(changed, torch.ones(4, 2), 3.0), "odd": pair()})
    assert len({digest(one), *map(digest, others)}) == 6
