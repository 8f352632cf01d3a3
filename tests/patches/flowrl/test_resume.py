"""States from before FlowRL, filled in: plain data, no framework needed."""

from flashpatch.patches.flowrl.checkpoint import with_group, with_rate

OLD = {"state": {0: "a", 1: "b"}, "param_groups": [{"lr": 0.5, "initial_lr": 1.0, "params": [0, 1]}]}
FRESH = {
    "state": {},
    "param_groups": [
        {"lr": 0.0, "initial_lr": 1.0, "params": [0, 1]},
        {"lr": 0.0, "initial_lr": 8.0, "weight_decay": 0.1, "params": [2, 3, 4]},
    ],
}


def test_the_second_group_joins_at_the_firsts_stage():
    filled = with_group(OLD, FRESH)
    assert filled["state"] == OLD["state"] and filled["param_groups"][0] == OLD["param_groups"][0]
    assert filled["param_groups"][1] == {
        "lr": 4.0,
        "initial_lr": 8.0,
        "weight_decay": 0.1,
        "params": [2, 3, 4],
    }
    assert len(OLD["param_groups"]) == 1


def test_a_state_that_has_both_stays():
    assert with_group(FRESH, FRESH) is FRESH and with_group({"flat.key": 1}, FRESH) == {"flat.key": 1}


def test_the_schedule_goes_on_for_both():
    old = {"base_lrs": [1.0], "_last_lr": [0.25], "last_epoch": 3, "lr_lambdas": [None]}
    fresh = {"base_lrs": [1.0, 8.0], "_last_lr": [0.0, 0.0], "last_epoch": 0, "lr_lambdas": [None, None]}
    assert with_rate(old, fresh) == {
        "base_lrs": [1.0, 8.0],
        "_last_lr": [0.25, 2.0],
        "last_epoch": 3,
        "lr_lambdas": [None, None],
    }
    assert with_rate(fresh, fresh) is fresh
