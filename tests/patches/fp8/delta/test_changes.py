"""What a patch costs, and that it makes the old tensor the new one, bit for bit."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashpatch.patches.fp8.delta import changes

KINDS = [
    getattr(torch, name)
    for name in "bfloat16 float32 float64 float16 float8_e4m3fn int8 bool complex128".split()
]


def pair(size: int, number: int, dtype=torch.bfloat16, seed: int = 0):
    """Two tensors, of which so many values differ."""
    random = torch.Generator().manual_seed(seed)
    old = torch.randn(size, generator=random).to(dtype)
    new = old.clone()
    at = torch.randperm(size, generator=random)[:number]
    changes.bits(new)[at] ^= 1
    return old, new


def patched(old, new):
    a, b = changes.bits(old.clone()), changes.bits(new)
    _, encoded = changes.encode(a, b)
    if encoded is None:
        return None, new.nbytes
    changes.apply(a, *encoded)
    return a, encoded[2].nbytes


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("number", [1, 7, 50])
def test_values_of_any_kind_become_the_new_ones(dtype, number):
    if dtype is torch.complex128:
        old, new = (one.to(dtype) for one in pair(5000, number, torch.float64))
    else:
        old, new = pair(5000, number, dtype)
    found, _ = patched(old, new)
    assert torch.equal(found, changes.bits(new)) and not torch.equal(found, changes.bits(old))


@pytest.mark.parametrize("share, most", [(0.001, 0.004), (0.01, 0.017), (0.03, 0.046), (0.1, 0.151)])
def test_a_patch_is_some_three_bytes_per_changed_value(share, most):
    size = 400_000
    old, new = pair(size, int(share * size))
    found, cost = patched(old, new)
    assert torch.equal(found, changes.bits(new))
    assert cost / new.nbytes < most


def test_zeros_of_two_signs_differ_and_a_nan_equals_itself():
    old = torch.tensor([0.0, float("nan"), 1.0] + [2.0] * 100, dtype=torch.bfloat16)
    new = old.clone()
    new[0] = -0.0
    assert changes.encode(changes.bits(old), changes.bits(new))[0] == 1
    found, _ = patched(old, new)
    assert torch.equal(found, changes.bits(new))


LIMITS = [[0], [255], [256], [257], [511, 512], [65_534], [65_535], [65_536]]
LIMITS += [[65_537, 199_999], [0, 256, 131_072]]


@pytest.mark.parametrize("positions", LIMITS)
def test_gaps_at_the_limits_of_their_bytes(positions):
    old = torch.zeros(200_000, dtype=torch.bfloat16)
    new = old.clone()
    new[positions] = 1.0
    found, _ = patched(old, new)
    assert torch.equal(found, changes.bits(new))


@pytest.mark.parametrize("gap", [1, 3, 250, 700])
def test_a_patch_is_the_same_in_any_chunks(monkeypatch, gap):
    old = torch.zeros(200_000, dtype=torch.bfloat16)
    new = old.clone()
    new[5::gap] = 1.0
    one = changes.encode(changes.bits(old), changes.bits(new))
    monkeypatch.setattr(changes, "_CHUNK", 1000)
    found, _ = patched(old, new)
    many = changes.encode(changes.bits(old), changes.bits(new))
    assert one[0] == many[0] == len(range(5, 200_000, gap))
    if gap == 1:
        assert one[1] is found is None
    else:
        assert one[1][:2] == many[1][:2] and torch.equal(one[1][2], many[1][2])
        assert torch.equal(found, changes.bits(new))


@pytest.mark.parametrize("share", [0.01, 0.6, 1.0])
def test_however_many_change_it_takes_no_more_than_another_tensor(share):
    old, new = (changes.bits(one) for one in pair(16 << 20, int(share * (16 << 20))))
    patched(old[:5000], new[:5000])
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest is what is now
    _, encoded = changes.encode(old, new)
    if encoded is not None:
        changes.apply(old, *encoded)
        assert torch.equal(old, new)
    assert memory("VmHWM") - before < 1.1 * new.nbytes + (64 << 20)


def memory(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


@pytest.mark.parametrize("cut", ["short", "count", "width", "tensor"])
def test_a_patch_that_does_not_fit_writes_nothing(cut):
    old, new = pair(5000, 40)
    a, b = changes.bits(old), changes.bits(new)
    _, (width, count, data) = changes.encode(a, b)
    before = a.clone()
    if cut == "short":
        data = data[:-16]
    if cut == "count":
        count += 40
    if cut == "width":
        width = 3
    if cut == "tensor":
        a = a[:3]
    with pytest.raises(ValueError, match="patch"):
        changes.apply(a, width, count, data)
    assert torch.equal(a, before[: a.numel()])


def test_an_accelerators_indices_are_the_same():
    mask = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.1
    there = SimpleNamespace(device=torch.device("cuda"), nonzero=mask.nonzero)
    assert torch.equal(changes._nonzero(there), changes._nonzero(mask)) and mask.any()


class Reads(TorchDispatchMode):
    """Count what waits for an accelerator: values that the host reads, and results whose size it must know."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 1.0])
def test_an_accelerator_is_waited_for_a_few_times_only(share, monkeypatch):
    parts, size = 8, 4096
    monkeypatch.setattr(changes, "_nonzero", lambda mask: mask.nonzero().view(-1))
    monkeypatch.setattr(changes, "_CHUNK", size)
    old = torch.zeros(parts * size, dtype=torch.int16)
    new = (torch.rand(old.shape, generator=torch.Generator().manual_seed(0)) < share).to(torch.int16)
    with Reads() as reads:
        changed, patch = changes.encode(old, new)
    assert changed == int(new.sum()) and reads.count <= 3 * parts + 2
    if patch is not None:
        changes.apply(old, *patch)
    assert patch is None or torch.equal(old, new)
    assert changes._at_once(torch.device("cuda")) * 2 <= 64 << 20 and changes._at_once(old.device) == size
