"""Tensors are cut and joined without loss, whatever their sizes; what does not fit together is refused."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.errors import PatchError
from flashpatch.patches.cpu import buckets

KINDS = ("float32", "bfloat16", "uint8", "bool", "float8_e4m3fn", "complex64")
TENSORS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=12
)


def made(wanted: list[tuple[str, list[int]]]) -> list[tuple[str, Any]]:
    """Tensors of these dtypes and shapes, every second one transposed in memory."""
    found = []
    for i, (kind, shape) in enumerate(wanted):
        raw = torch.randint(0, 2, shape[::-1] if i % 2 else shape).to(getattr(torch, kind))
        found.append((f"w{i}", raw.permute(list(reversed(range(raw.dim())))) if i % 2 else raw))
    return found


def packed(tensors: list[tuple[str, Any]], size: int) -> tuple[list[Any], Any]:
    """Pieces as a receiver gets them, each in a bucket of its own, and what the sender counted."""
    found, contents = [], buckets.Contents()
    for name, tensor in tensors:
        for piece in buckets.cut(name, tensor, size):
            found.append([as_ray(piece)])
            contents.add(piece)
    return found, contents


def as_ray(piece: buckets.Piece) -> buckets.Piece:
    """A piece after the object store: a copy that cannot be written to."""
    found = pickle.loads(pickle.dumps(piece))
    found.data.flags.writeable = False
    return found


@settings(max_examples=60)
@given(TENSORS, st.sampled_from([64, 100, 1000, 1 << 20]))
def test_any_tensors_come_back_as_they_were(wanted, size):
    tensors = made(wanted)
    sent, contents = packed(tensors, size)
    joiner = buckets.Joiner()
    back = [found for pieces in sent for found in joiner.take(pieces)]
    assert [name for name, _ in back] == [name for name, _ in tensors]
    for (_, before), (_, after) in zip(tensors, back, strict=True):
        assert before.dtype == after.dtype and before.shape == after.shape
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (before, after)]
        assert torch.equal(*as_bytes)
    assert vars(joiner.contents) == vars(contents)
    assert all(piece.data.size <= size for [piece] in sent)


def test_tensors_are_copies_that_a_loader_may_keep_and_change():
    sent, _ = packed([("small", torch.ones(4)), ("large", torch.arange(100.0))], 64)
    for _ in range(2):  # as two rollouts take them
        joiner = buckets.Joiner()
        (_, small), (_, large) = [found for pieces in sent for found in joiner.take(pieces)]
        assert small.sum() == 4 and large.sum() == 4950
        small.mul_(2), large.zero_()


@pytest.mark.parametrize("order", [[0, 2], [1], [0, 1, 1], [0, 1, 2, 3, 4, 5, 3], [0, 1, 2, 4, 3, 5, 6, 7]])
def test_buckets_that_are_missing_repeated_or_in_another_order_are_told(order):
    sent, contents = packed([("large", torch.arange(100.0)), ("next", torch.ones(2))], 64)
    joiner = buckets.Joiner()
    try:
        for number in order:
            list(joiner.take(sent[number]))
    except (PatchError, ValueError):
        return
    assert vars(joiner.contents) != vars(contents)


def test_a_bit_that_changed_on_the_way_is_refused_by_the_tensor_s_name():
    [one], [other] = packed([("one", torch.ones(4)), ("other", torch.ones(4))], 64)[0]
    data = other.data.copy()
    data[3] ^= 4
    taken = buckets.Joiner().take([one, other._replace(data=data)])
    assert next(taken)[0] == "one"
    with pytest.raises(PatchError, match="other, bytes 0 to 16, arrived with the CRC-32"):
        next(taken)


def test_names_in_another_order_are_told():
    one, other = buckets.Contents(), buckets.Contents()
    for contents, names in ((one, "ab"), (other, "ba")):
        for name in names:
            contents.add(next(buckets.cut(name, torch.ones(2), 64)))
    assert vars(one) != vars(other)
    assert {**vars(one), "checksum": 0} == {**vars(other), "checksum": 0}
