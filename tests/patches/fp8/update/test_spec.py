"""What went wrong once (U1 to U8): each as a sequence, of toys under the core and of the specification beside it.

A `Toy` compares each call's end, each answer and each value with the specification; a test says what matters in words."""

import logging

import pytest
from update_spec import SPOILED
from update_toys import BUFFERS, EMBEDDING, HEAD, NAMES, Options, Toy

Q = "layers.0.q.weight"


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="flashpatch.fp8")


def sync(toy, number, names=NAMES, asked=()):
    """A sender that names nothing, a tensor per call; ``asked``: after which of them a request comes."""
    for place, name in enumerate(names):
        toy.load([(name, number)])
        if place in asked:
            assert not toy.request()


def of(number, names=NAMES):
    return [(name, number) for name in names]


@pytest.mark.parametrize("known", [1, 3])
def test_u1_a_call_repeated_and_a_request_within_later_syncs_mix_nothing(atomic, known):
    toy = Toy(Options(atomic))
    for number in range(1, known + 1):
        sync(toy, number)
        assert toy.request()
    sync(toy, 11, NAMES[:5])
    toy.load(of(11, NAMES[4:5]))
    assert not toy.request()
    sync(toy, 11, NAMES[5:])  # no request at its end
    sync(toy, 12, asked=(3,))
    assert toy.request()
    for number in (13, 14, 15, 16, 17):
        sync(toy, number, asked=(3,))
        assert toy.request() and set(toy.live().values()) == {number}


def test_a_sender_that_goes_on_behind_a_session_of_another_one_mixes_nothing(atomic):
    toy = Toy(Options(atomic))
    sync(toy, 1)
    assert toy.request()
    sync(toy, 2, NAMES[:4])
    toy.begin()
    toy.load(of(3))
    toy.finish()
    toy.load(of(2, NAMES[4:5]))
    assert toy.raised and not toy.request()
    sync(toy, 4)
    assert toy.request()


def test_u2_a_call_repeated_in_the_first_sync_costs_no_later_sync(atomic):
    toy = Toy(Options(atomic))
    sync(toy, 1, NAMES[:4])
    toy.load(of(1, NAMES[3:4]))
    assert not toy.request()
    sync(toy, 1, NAMES[4:])
    assert toy.request()
    for number in (2, 3, 4, 5):
        sync(toy, number, asked=(4,))
        assert toy.request() and set(toy.live().values()) == {number}


def test_u3_buffers_that_come_in_a_later_call(atomic):
    toy = Toy(Options(atomic, dummy=True))
    for number in (1, 2):
        toy.load(of(number, [name for name in NAMES if name not in BUFFERS]))
        assert not toy.request()
        toy.load(of(number, BUFFERS))
        assert toy.request() and set(toy.live().values()) == {number}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("first", [HEAD, EMBEDDING])
def test_u4_a_tied_model_that_is_sent_one_of_the_two_first(atomic, first, frozen):
    toy = Toy(Options(atomic, ties="found"))
    rest = [name for name in NAMES if name not in (HEAD, EMBEDDING)]
    for number in (1, 2):
        toy.load([(first, 1 if frozen else number)])
        sync(toy, number, rest)
        assert toy.request()


@pytest.mark.parametrize("fault", ["raises", "shape", "unknown", "spoiled", "missing"])
@pytest.mark.parametrize("door", ["session", "end", "one call", "calls"])
def test_u5_every_door_that_fails_opens_again(atomic, door, fault):
    toy = Toy(Options(atomic))

    def whole(number, order):
        if door == "session":
            toy.begin()
        if door == "one call":
            toy.load(of(number, order))
        else:
            sync(toy, number, order)
        if door in ("session", "end"):
            toy.finish()
        return toy.request()

    orders = (NAMES, NAMES[::-1], NAMES) if door in ("session", "end") else (NAMES,) * 3
    assert whole(1, orders[0])
    if door == "session":
        toy.begin()
    if fault == "spoiled":
        toy.load([*of(2, NAMES[:1]), (NAMES[1], SPOILED), *of(2, NAMES[2:])])
    elif fault == "missing":
        toy.load(of(2, NAMES[:5]))
    else:
        toy.load(of(2, NAMES[:3]), fault)
    if fault in ("spoiled", "missing") and door in ("session", "end") and not toy.raised:
        toy.finish()
    toy.request()
    assert whole(3, orders[1]) and whole(4, orders[2])


def test_u6_a_sender_that_names_its_ends_may_change_its_order(atomic):
    toy = Toy(Options(atomic))
    for number, order in enumerate((NAMES, NAMES[::-1], NAMES[3:] + NAMES[:3], NAMES), 1):
        sync(toy, number, order)
        if number != 2:  # until an end was named, a request is one
            assert toy.request() == (number == 1)
        toy.finish()
        assert toy.request()


@pytest.mark.parametrize("cuts", [1, 3])
@pytest.mark.parametrize("half", [2, 4, 6])
def test_u7_half_a_session_and_then_everything_again_in_another_order(atomic, cuts, half):
    toy = Toy(Options(atomic))
    toy.begin()
    again = NAMES[::-1]
    for order, number in ((NAMES[:half], 1), (again, 2)):
        for start in range(0, len(order), cuts):
            toy.load(of(number, order[start : start + cuts]))
    toy.finish()
    if toy.raised:  # a part of a layer that was complete came again, and the others did not
        assert "did not come" in str(toy.raised[-1]) and not toy.raised.clear()
        toy.begin()
        toy.load(of(3))
        toy.finish()
    assert toy.request()


def test_u8_ties_found_after_the_load_and_an_update_that_begins_within_a_call(atomic):
    toy = Toy(Options(atomic, ties="found"))
    toy.load(of(1, [Q]))
    rest = [name for name in NAMES if name not in (HEAD, Q, EMBEDDING)]
    toy.load([(HEAD, 2), (Q, 2), (EMBEDDING, 3), *of(2, rest)])
    assert toy.raised
    toy.begin()
    toy.load(of(4))
    toy.finish()
    assert toy.request()


def test_u8_the_embedding_alone_and_then_everything_with_it_last(atomic):
    toy = Toy(Options(atomic, ties="found"))
    toy.load(of(1, [EMBEDDING]))
    toy.load(of(2, [*(name for name in NAMES if name != EMBEDDING), EMBEDDING]))
    assert toy.request()


def test_a_call_that_is_sent_again_after_a_failed_sync_is_no_beginning(atomic):
    """Before a sync was committed nothing told where one begins, and parts of two policies were committed. W1."""
    toy = Toy(Options(atomic))
    toy.load(of(1, NAMES[:3]))
    toy.load(of(1, NAMES[3:5]), "raises")
    toy.load(of(1, NAMES[3:]))
    assert toy.raised and not toy.request()
    toy.load(of(2, NAMES[:3]))
    assert not toy.request()
    toy.load(of(2, NAMES[3:]))
    assert toy.request() and set(toy.live().values()) == {2}


def test_halves_of_two_syncs_whose_ends_are_named_are_no_policy(atomic):
    """The first dies, the next comes in another order, and a request comes when the two make a whole. W2."""
    toy = Toy(Options(atomic))
    sync(toy, 1)
    toy.finish()
    sync(toy, 2, NAMES[:5])
    sync(toy, 3, NAMES[5:])
    assert not toy.request()
    sync(toy, 3, NAMES[:5])
    toy.finish()
    toy.begin()
    toy.load(of(4))
    toy.finish()
    assert toy.request()
