"""Which elements were written, against a boolean mask that is simply painted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.patches.fp8.update import tensors as coverage_module
from flashpatch.patches.fp8.update.tensors import Coverage

QUICK = settings(max_examples=80, derandomize=True)
sizes = st.integers(1, 4)


@st.composite
def parameters(draw):
    """A tensor of up to three dimensions: contiguous, permuted, a strided part of a larger one, or offset."""
    shape = draw(st.lists(sizes, min_size=1, max_size=3))
    padding = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 3))
    whole = [size + more for size, more in zip(shape, padding)]
    numel = torch.Size(whole).numel()
    base = torch.zeros(offset + numel, dtype=torch.uint8)[offset:].view(whole)
    tensor = base[tuple(slice(0, size) for size in shape)]
    return tensor.permute(draw(st.permutations(range(len(shape)))))


@st.composite
def views(draw, tensor):
    """A part of ``tensor``: sliced with steps, then perhaps transposed, unsqueezed or flattened."""
    index = []
    for size in tensor.shape:
        first = draw(st.integers(0, size - 1))
        last = draw(st.integers(first + 1, size))
        index.append(slice(first, last, draw(st.sampled_from([1, 1, 1, 2]))))
    view = tensor[tuple(index)]
    if draw(st.booleans()):
        view = view.permute(draw(st.permutations(range(view.dim()))))
    how = draw(st.sampled_from(["as it is", "unsqueezed", "flat", "select"]))
    if how == "unsqueezed":
        view = view.unsqueeze(draw(st.integers(0, view.dim())))
    elif how == "flat" and view.is_contiguous():
        view = view.view(-1)
    elif how == "select" and view.dim() > 1:
        view = view.select(0, draw(st.integers(0, len(view) - 1)))
    return view


def coverage_of(tensor):
    return Coverage(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


def elements(coverage, shape):
    """The mask that a coverage stands for."""
    if coverage.mask is not None:
        return coverage.mask
    mask = torch.zeros(shape, dtype=torch.bool)
    for box in coverage.boxes:
        mask[tuple(slice(*edge) for edge in box)] = True
    return mask


@QUICK
@given(st.data())
def test_any_writes(data):
    tensor = data.draw(parameters())
    coverage = coverage_of(tensor)
    assert coverage.covered == 0 and coverage.total == tensor.numel()
    for _ in range(data.draw(st.integers(1, 5))):
        view = data.draw(views(tensor))
        view.fill_(1)
        coverage.add(view)
        assert coverage.covered == int(tensor.sum())
        assert torch.equal(elements(coverage, tensor.shape), tensor.bool())


@QUICK
@given(st.data())
def test_writes_beyond_the_tensor(data):
    """Any strided view of the same storage, reaching beyond or between the tensor's elements."""
    tensor = data.draw(parameters())
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    first = data.draw(st.integers(0, len(flat) - 1))
    size = data.draw(st.integers(1, len(flat) - first))
    view = flat[first : first + size : data.draw(st.integers(1, 3))]
    view.fill_(1)
    coverage = coverage_of(tensor)
    coverage.add(view)
    assert coverage.covered == int(tensor.sum())


@QUICK
@given(st.data())
def test_what_satisfies_an_expectation(data):
    """Exactly those coverages that hold every element the expectation holds, however they were cut."""
    tensor = data.draw(parameters())
    expected, got = coverage_of(tensor), coverage_of(tensor)
    seen = {}
    for name, coverage in (("expected", expected), ("got", got)):
        tensor.zero_()
        for box in range(data.draw(st.integers(0, 3))):
            view = data.draw(views(tensor))
            if coverage.box(view) in coverage.boxes or int(view.sum()):
                continue  # repeated and overlapping writes have a rule of their own
            view.fill_(1)
            coverage.add(view)
        seen[name] = tensor.clone().bool()
    assert got.satisfies(expected) == bool((seen["got"] | ~seen["expected"]).all())


def test_a_write_made_twice_is_expected_twice():
    param = torch.zeros(4, 4)
    expected, got = coverage_of(param), coverage_of(param)
    expected.add(param, "w")
    expected.add(param)
    got.add(param)
    assert not got.satisfies(expected)
    got.add(param)
    assert got.satisfies(expected)


def test_clearing_everything_first_is_no_load():
    """A loader that zeroes the whole tensor before its shards has not brought the shards."""
    param = torch.zeros(4, 4)
    expected, got = coverage_of(param), coverage_of(param)
    for view in (param, param[:2], param[2:]):
        expected.add(view)
    for view in (param, param[:2]):
        got.add(view)
    assert not got.satisfies(expected)
    got.add(param[2:])
    assert got.satisfies(expected)


@pytest.mark.parametrize("shards", ["in order", "by shard", "backwards"])
def test_the_cost_of_a_write_does_not_grow_with_the_experts(shards, monkeypatch):
    """Boxes that one write is compared with, of w1 and w3 in one parameter [experts, 4, 2]: at most its expert's own."""
    compared = []

    def counting(a, b, original=coverage_module._overlap):
        compared.append((a, b))
        return original(a, b)

    monkeypatch.setattr(coverage_module, "_overlap", counting)
    per_write = {}
    for experts in (8, 128, 384):
        param = torch.zeros(experts, 4, 2)
        writes = [(expert, half) for expert in range(experts) for half in (0, 1)]
        if shards == "by shard":
            writes.sort(key=lambda write: write[1])
        elif shards == "backwards":
            writes.reverse()
        coverage, largest = coverage_of(param), 0
        for expert, half in writes:
            compared.clear()
            coverage.add(param[expert].narrow(0, 2 * half, 2), f"{expert}.{half}")
            largest = max(largest, len(compared))
        assert coverage.covered == coverage.total and coverage.mask is None
        per_write[experts] = largest
    assert per_write == {8: 1, 128: 1, 384: 1}


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_nothing_and_scalars(shape):
    param = torch.zeros(shape)
    coverage = coverage_of(param)
    coverage.add(param)
    assert coverage.covered == coverage.total == param.numel()


def test_whole_tensors_and_shards_need_no_mask():
    param = torch.zeros(64, 32).t()
    coverage = coverage_of(param)
    for first in range(0, 64, 16):
        coverage.add(param[:, first : first + 16])
        coverage.add(param[:, first : first + 16])
    assert coverage.mask is None and coverage.covered == coverage.total


def test_what_is_no_rectangle_may_lie_over_anything():
    coverage = coverage_of(torch.zeros(4, 4))
    assert not coverage.overlaps_any(None)
    coverage.add(torch.zeros(16)[1:6])
    assert coverage.mask is not None and coverage.overlaps_any(((3, 4), (0, 4)))
