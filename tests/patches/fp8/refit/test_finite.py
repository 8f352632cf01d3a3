"""NaN and infinite values are found while they are copied, or afterwards; never neither."""

import pytest

torch = pytest.importorskip("torch")

import fp8_toys as toys
from torch.utils._python_dispatch import TorchDispatchMode

from flashpatch import PatchError
from flashpatch.patches.fp8.refit import finite, layer
from flashpatch.patches.fp8.refit.pristine_params import record
from flashpatch.patches.fp8.refit.write_tracker import WriteTracker, storage_identity

B = toys.checkpoint(1)
WIDE = "layers.0.down.weight"


@pytest.fixture
def looked_at(monkeypatch) -> list[tuple[int, ...]]:
    """Sum all copies, however small, two rows at a time; return the shapes of what is looked at as a whole."""
    found = []
    monkeypatch.setattr(finite, "_LEAST", 1)
    monkeypatch.setattr(finite, "_BLOCK", 64)
    monkeypatch.setattr(
        layer, "is_finite", lambda one: found.append(tuple(one.shape)) or finite.is_finite(one)
    )
    return found


def test_what_was_copied_is_not_read_again(looked_at):
    engine = toys.engine()
    engine.update(B)
    assert toys.same_answers(engine.model, toys.fresh("transposed", B)) and not looked_at


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 9, -1])
def test_one_value_that_is_not_finite_ends_the_update(looked_at, value, at):
    weights = {name: tensor.clone() for name, tensor in B}
    weights[WIDE].view(-1)[at] = value
    with pytest.raises(PatchError, match=f"{WIDE} holds NaN or Inf"):
        toys.engine().update(list(weights.items()))


def test_what_is_written_otherwise_is_looked_at_as_a_whole(looked_at):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
    [param] = record({"layer": module}, torch.device("cpu"))
    staged = param.stage()
    param.allocate()
    tracker = WriteTracker({storage_identity(staged): [param]}, lambda *at: None, summed=True)
    with tracker:
        staged.data[:4].copy_(torch.ones(4, 4))
        assert param.known_finite
        staged.data[4:].fill_(float("nan"))
        staged.data[:4].copy_(torch.ones(4, 4))
        assert not param.known_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_in_blocks_is_the_copy(looked_at, dtype):
    source = torch.randn(7, 33)
    for target in (torch.empty(7, 33, dtype=dtype), torch.empty(33, 7, dtype=dtype).t()):
        total = finite.copied(target, source)
        assert total.isfinite() and torch.equal(target, source.to(dtype))
    assert finite.copied(target, source[0]) is None  # broadcast
    assert finite.copied(torch.empty(()), torch.ones(())) is None
    assert finite.copied(torch.empty(7, 33, dtype=torch.int8), source) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_sum_hides_what_is_not_finite(dtype, value):
    values = torch.ones(1000, dtype=dtype)
    values[500] = value
    assert not finite.is_finite(values)
    values[501] = -value  # infinities of both signs
    assert not finite.is_finite(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_beyond_the_range_of_its_type_is_looked_at_again(dtype):
    values = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert not torch.isfinite(values.sum()) and finite.is_finite(values)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_types_of_one_byte_are_looked_at_in_pieces(monkeypatch, dtype):
    """However large the tensor is, what is made beside it is a piece's."""
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and not func.is_view:
                largest.append(found.nbytes)
            return found

    monkeypatch.setattr(finite, "_PIECE", 64)
    for values in (torch.ones(100, 8), torch.ones(8, 100).t(), torch.tensor(1.0)):
        values = values.to(dtype)
        with Watch():
            assert finite.is_finite(values)
        for byte in range(256) if values.dim() else ():
            values.view(torch.uint8)[70, 3] = byte
            assert finite.is_finite(values) == bool(values.float().isfinite().all())
    assert max(largest) <= 64 * 4


def test_what_is_on_an_accelerator_is_looked_at_afterwards():
    """A sum there would be a launch per block, and a wait for the device."""
    target, source = (torch.empty(1 << 11, 1 << 11, device=device) for device in ("meta", "cpu"))
    assert target.nbytes >= finite._LEAST
    assert finite.copied(target, source) is None and finite.copied(source.clone(), source.zero_()) is not None
