"""Record1 and the tensors staged from it."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.update.tensors import (
    SMALL,
    Coverage,
    PristineParam,
    WriteTracker,
    record,
    storage_identity,
)

CPU = torch.device("cpu")
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def module_of(**tensors) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


def params_of(**tensors) -> dict[str, PristineParam]:
    return {param.key: param for param in record({"m": module_of(**tensors)}, CPU)}


def parameter(*shape, dtype=torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", FLOATS)
def test_poison_is_never_a_number(dtype):
    param = params_of(w=parameter(8, dtype=dtype))["w"]
    param.stage()
    param.allocate()
    assert param.tensor.float().isnan().all()


@pytest.mark.parametrize("value", [0.0, 1.0, -7.0])
def test_gaps_that_loaders_always_leave_are_as_at_birth(value):
    original = nn.Parameter(torch.full((8,), value), requires_grad=False)
    param = params_of(w=original)["w"]
    param.expected = Coverage(param.shape, param.stride)
    param.expected.add(original[:5])
    param.stage()
    param.allocate()
    param.tensor[:5] = 9
    assert param.tensor.tolist() == [9] * 5 + [value] * 3


def test_large_tensors_are_filled_from_the_running_layer():
    param = params_of(w=parameter(SMALL + 1))["w"]
    assert param.initial is None
    param.fill(torch.full((SMALL + 1,), 7.0))
    assert (param.stage() == 7).all()
    param.forget()
    param.tensor = None
    with pytest.raises(PatchError, match="m.w is not in the checkpoint and its initial values are gone"):
        param.fill(torch.ones(3))


def test_the_original_tensor_is_not_held():
    module = module_of(w=parameter(4, 4))
    reference = weakref.ref(module.w.untyped_storage())
    params = record({"m": module}, CPU)
    module.w = parameter(2)
    gc.collect()
    assert reference() is None and params[0].live().shape == (2,)


@pytest.mark.parametrize("first", ["w", "alias"])
def test_tensors_that_shared_memory_share_it_when_staged(first):
    base = torch.zeros(4, 4)
    params = params_of(w=nn.Parameter(base, requires_grad=False), alias=base[1:3], other=torch.zeros(2))
    assert params["w"].storage is params["alias"].storage is not params["other"].storage
    early = params["alias"].stage() if first == "alias" else None
    w = params["w"].stage()
    params["w"].allocate()
    w.fill_(5)
    alias = params["alias"].stage()  # staged afterwards it keeps what the first holds
    assert (alias == 5).all() and alias.shape == (2, 4) and early in (None, alias)


@pytest.mark.parametrize("name", ["w", "b"])
def test_meta_tensors_are_staged_on_the_models_device(name):
    tensor = torch.zeros(4, device="meta")
    param = params_of(**{name: nn.Parameter(tensor) if name == "w" else tensor})[name]
    staged = param.stage()
    param.allocate()
    assert staged.device == CPU and staged.isnan().all() and param.initial is None


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32, torch.float8_e5m2, torch.uint8, None])
def test_an_8_bit_float_takes_its_own_dtype_alone(given):
    """Values of another one mean something else beside the same scale."""
    param = params_of(weight=parameter(2, dtype=torch.float8_e4m3fn))["weight"]
    staged = param.stage()
    param.allocate()
    values = torch.ones(2, dtype=given or torch.float8_e4m3fn)
    refused = (
        nullcontext()
        if given is None
        else pytest.raises(PatchError, match="holds float8_e4m3fn but was given")
    )
    with WriteTracker({storage_identity(staged): [param]}, lambda *at: None), refused:
        staged.data.copy_(values)


def test_shapes_of_packed_experts_take_integers_and_weights_do_not():
    """vLLM makes both in the model's dtype."""
    for param in params_of(
        **{name: parameter(2, dtype=torch.bfloat16) for name in ("w2_weight_shape", "w2_weight")}
    ).values():
        staged = param.stage()
        param.allocate()
        written = []
        with WriteTracker({storage_identity(staged): [param]}, lambda *at: written.append(at)):
            if param.key == "w2_weight":
                with pytest.raises(PatchError, match="w2_weight holds bfloat16 but was given int64"):
                    staged.data.copy_(torch.tensor([64, 128]))
            else:
                staged.data[0:2] = torch.tensor([64, 128])
        assert len(written) == (param.key == "w2_weight_shape")
