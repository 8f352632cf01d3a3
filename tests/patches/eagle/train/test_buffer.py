import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.patches.eagle.capture.sample import Sample
from flashpatch.patches.eagle.train.buffer import Buffer


def sample(number: int, version: int = 1, length: int = 4) -> Sample:
    flags = torch.ones(length, dtype=torch.bool)
    return Sample(
        str(number), torch.zeros(length, dtype=torch.int64), torch.zeros(length, 8), flags, flags, version
    )


@settings(max_examples=25)
@given(
    bound=st.integers(1, 8),
    size=st.integers(200, 2000),
    coming=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), max_size=40),
    versions=st.integers(0, 3),
)
def test_bounds_hold_whatever_comes(bound, size, coming, versions):
    buffer = Buffer(samples=bound, bytes=size, versions=versions)
    for number, (version, length) in enumerate(coming):
        buffer.add(sample(number, version, length))
        held = buffer.draw(100)
        assert len(held) == len(buffer) <= bound
        assert sum(one.bytes for one in held) <= size
        newest = max(version for version, _ in coming[: number + 1])
        assert not versions or all(one.version > newest - versions for one in held)
        assert len({one.request for one in held}) == len(held)
        if not versions and size > 900:  # each fits
            numbers = sorted(int(one.request) for one in held)
            assert numbers == [*range(number + 1 - len(held), number + 1)], "others than the newest"
