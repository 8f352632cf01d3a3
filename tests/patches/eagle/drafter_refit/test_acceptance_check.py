"""Compare acceptance before and after an update."""

from flashpatch.patches.eagle.drafter_refit.acceptance_check import AcceptanceCheck, DraftCounts


def test_an_update_is_judged_by_the_steps_around_it() -> None:
    check = AcceptanceCheck(max_drafts=3, tolerance=0.2, steps=10)
    for _ in range(30):
        assert check.add(DraftCounts(tried=3, accepted=3)) is None
    assert check.start() == 4.0
    verdicts = [check.add(DraftCounts(tried=1, accepted=0)) for _ in range(10)]
    assert verdicts[:-1] == [None] * 9 and verdicts[-1] == (4.0, 1.0, "worse")
    check.cancel()
    for _ in range(10):
        check.add(DraftCounts(tried=2, accepted=1))
    check.start()
    verdict = [check.add(DraftCounts(tried=2, accepted=1)) for _ in range(10)][-1]
    assert verdict == (1.875, 1.875, "kept")


def test_a_fall_after_few_steps_before_is_a_doubt() -> None:
    for enough in (False, True):
        check = AcceptanceCheck(max_drafts=3, tolerance=0.2, steps=8)
        for _ in range(1 + enough):
            check.add(DraftCounts(3, 3))
        check.start()
        outcome = "worse" if enough else "doubted"
        assert [check.add(DraftCounts(1, 0)) for _ in range(8)][-1] == (4.0, 1.0, outcome)


def test_updates_in_a_row_are_judged_by_the_steps_before_the_first() -> None:
    check = AcceptanceCheck(max_drafts=3, tolerance=0.2, steps=4)
    for _ in range(4):
        check.add(DraftCounts(3, 3))
    check.start()
    check.add(DraftCounts(1, 0))
    check.start()
    assert [check.add(DraftCounts(2, 1)) for _ in range(3)][-1][::2] == (4.0, "doubted")


def test_an_update_with_no_steps_before_it_is_compared_with_the_old_weights() -> None:
    check = AcceptanceCheck(max_drafts=3, tolerance=0.2, steps=4)

    def judged(tried: int, accepted: int) -> tuple[float, float, str]:
        return [check.add(DraftCounts(tried, accepted)) for _ in range(4)][-1]

    check.start()
    assert judged(2, 1) == (0.0, 1.875, "doubted")
    check.start_trial()
    assert judged(1, 0) == (1.0, 1.875, "kept")
    check.cancel()
    assert check.start() == 1.875
    assert judged(1, 0) == (1.875, 1.0, "doubted")
    check = AcceptanceCheck(max_drafts=3, tolerance=1, steps=4)
    check.start()
    assert judged(1, 0) == (0.0, 1.0, "kept")
