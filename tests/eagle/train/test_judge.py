import random

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.train.judge import Judge


def feed(judge, mean, steps, seed=0, rows=4):
    source = random.Random(seed)
    for _ in range(steps):
        judge.saw(rows * max(0.1, source.gauss(mean, 0.3)), rows)


def judged(before, after, **how):
    judge = Judge(**how)
    feed(judge, before, 100)
    judge.changed()
    feed(judge, after, 100, seed=1)
    return judge.verdict()


def test_a_drafter_that_made_acceptance_worse_goes_back_once():
    judge = Judge()
    feed(judge, 3.0, 100)
    judge.changed()
    assert judge.verdict() == "wait"
    feed(judge, 1.5, 63)
    assert judge.verdict() == "wait"
    feed(judge, 1.5, 1)
    assert judge.verdict() == "roll back"
    assert judge.before.mean == pytest.approx(3.0, abs=0.2) and judge.after.mean == pytest.approx(
        1.5, abs=0.2
    )
    assert judge.verdict() == "keep"


def test_what_is_better_equal_or_little_worse_stays():
    assert [judged(3.0, after) for after in (4.0, 3.0, 2.7)] == ["keep"] * 3
    assert judged(3.0, 2.7, share=0.05) == "roll back"
    assert judged(3.0, 1.0, share=1.0) == "keep"


def test_noise_is_no_loss():
    judge = Judge(share=0.0, steps=20)
    verdicts = []
    for trial in range(60):
        feed(judge, 3.0, 40, seed=trial)
        judge.changed()
        feed(judge, 3.0, 20, seed=1000 + trial)
        verdicts.append(judge.verdict())
    assert verdicts.count("roll back") <= 6


def test_without_a_measure_before_nothing_goes_back():
    judge = Judge()
    feed(judge, 3.0, 3)
    judge.changed()
    feed(judge, 1.0, 64)
    assert judge.verdict() == "keep"


def test_weights_that_were_never_judged_are_no_measure():
    judge = Judge()
    feed(judge, 3.0, 64)
    judge.changed()
    feed(judge, 1.0, 5)
    judge.changed()
    assert judge.before.mean == pytest.approx(3.0, abs=0.2)
    feed(judge, 1.0, 64)
    assert judge.verdict() == "roll back"


def test_after_a_rollback_the_older_weights_are_measured_anew():
    judge = Judge()
    feed(judge, 3.0, 64)
    judge.changed()
    feed(judge, 1.0, 64)
    assert judge.verdict() == "roll back"
    judge.rolled_back()
    feed(judge, 2.0, 64)
    judge.changed()
    assert judge.before.mean == pytest.approx(2.0, abs=0.2)


def test_what_is_no_acceptance_is_counted_and_forgotten():
    judge = Judge()
    for tokens, rows in ((float("nan"), 4), (float("inf"), 1), (0.0, 4), (-3.0, 2), (4.0, 0)):
        judge.saw(tokens, rows)
    assert judge.ignored == 5
    with pytest.raises(PatchError, match="rollback"):
        Judge(share=1.5)
