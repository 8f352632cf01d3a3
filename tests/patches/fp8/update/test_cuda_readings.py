"""On a device, or the fake one, numbers are asked for together: which operators are launched, and that nothing is missed."""

from collections import Counter
from contextlib import nullcontext

import fp8_toys as toys
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashpatch import PatchError
from flashpatch.patches.fp8.precision import quantize, readings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in str(func):
            self.seen[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("how", [(form, cut) for form in quantize.DTYPES for cut in ("channel", "tensor")])
def test_values_are_those_of_a_cpu(how, monkeypatch):
    monkeypatch.setattr(quantize, "ON_DEVICE", 1000)
    for number, rows in enumerate((300, 16, 7, 300)):
        w = random(rows, 40, seed=number)
        found, expected = quantize.quantized(w.cuda(), *how), quantize.quantized(w, *how)
        assert all(torch.equal(one.cpu().float(), other.float()) for one, other in zip(found, expected))


def test_a_weight_takes_few_launches_and_the_host_waits_once(monkeypatch):
    monkeypatch.setattr(readings, "Unseen", nullcontext)
    weights, asked = [random(64, 64).cuda() for _ in range(8)], readings.Readings()
    with Launches() as launches:
        for w in weights:
            _, scale = quantize.quantized(w, "int8")
            asked.finite(scale, "w")
        assert launches.seen.total() == 8 * 8, launches.seen
        asked.check()
        assert launches.seen.total() == 8 * 8 + 3  # norms, their stack, and a copy to the host
    assert launches.seen["_local_scalar_dense"] == 0


@pytest.mark.parametrize("atomic", ["layer", "model"])
@pytest.mark.parametrize("name", [name for name, _ in toys.checkpoint(1)])
def test_what_is_not_finite_is_named_before_it_is_served(atomic, name):
    engine = toys.Engine(toys.Model().cuda(), on_device(0), device=torch.device("cuda"), atomic=atomic)
    spoilt = [(key, value * torch.nan if key == name else value) for key, value in on_device(1)]
    with pytest.raises(PatchError, match="holds NaN or Inf") as refused:
        engine.load(spoilt)
    part = name.replace(".q.", ".qkv.").replace(".k.", ".qkv.").replace(".v.", ".qkv.")
    assert part in str(refused.value) and engine.managed.may_generate == (atomic == "model")
    engine.update(on_device(1))
    assert engine.managed.may_generate


def on_device(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.cuda()) for name, tensor in toys.checkpoint(seed)]
