"""The kernels that FlashPatch brings to vLLM on CPUs: chosen while it is on, on either kind of CPU, and
right.

A machine with AMX runs vLLM's other kernels. What decides between them is answered here for both kinds, so
that a machine of one kind guards the other as far as its own instructions reach."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import environment, scenario

pytestmark = pytest.mark.vllm

OURS = "FlashPatchCPUFP8LinearKernel"
_CHANNEL = "ChannelWiseTorchFP8ScaledMMLinearKernel"
_TENSOR = "PerTensorTorchFP8ScaledMMLinearKernel"
STOCK = {  # by whether there is AMX
    False: dict(channel=_CHANNEL, tensor=_TENSOR),
    True: dict(channel=_CHANNEL, tensor="CPUFp8PerTensorScaledMMLinearKernel"),
}


# --- what runs in vLLM's process


@contextmanager
def cpu_kind(has_amx: bool) -> Iterator[None]:
    """As vLLM would find a CPU with AMX, or without, and its library for that CPU."""
    import torch
    from vllm import _custom_ops

    asked, present = torch.cpu._is_amx_tile_supported, _custom_ops._supports_cpu_fp8_w8a16
    torch.cpu._is_amx_tile_supported = lambda: has_amx
    _custom_ops._supports_cpu_fp8_w8a16 = has_amx
    try:
        yield
    finally:
        torch.cpu._is_amx_tile_supported, _custom_ops._supports_cpu_fp8_w8a16 = asked, present


def fp8_kernel(scales: str, n: int, k: int) -> Any:
    """The kernel that vLLM chooses for a weight [n, k] and bf16 activations."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    token, channel = keys.kFp8DynamicTokenSym, keys.kFp8StaticChannelSym
    if scales == "tensor":
        token, channel = keys.kFp8DynamicTensorSym, keys.kFp8StaticTensorSym
    with set_current_vllm_config(VllmConfig()):
        return init_fp8_linear_kernel(token, channel, torch.bfloat16, torch.bfloat16, (n, k))


def fp8_layer(codes: Any, scale: Any) -> Any:
    """A layer with what vLLM's schemes leave of a weight [n, k]: its transpose, and scales."""
    import torch

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(codes.t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    layer.input_scale = None
    return layer


def choices(has_amx: bool) -> dict[str, Any]:
    """Names of the kernels chosen before, while and after the family is on, and vLLM's own list of them."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms.interface import PlatformEnum

    import flashpatch

    def chosen() -> dict[str, str]:
        with cpu_kind(has_amx):
            return {scales: type(fp8_kernel(scales, 64, 64)).__name__ for scales in ("channel", "tensor")}

    kernels = linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU]
    listed = [id(kernels), *map(id, kernels)]
    found: dict[str, Any] = dict(before=chosen(), stock=[kernel.__name__ for kernel in kernels])
    flashpatch.enable("fp8")
    found["on"] = chosen()
    found["state"] = flashpatch.status()["fp8.vllm.possible_fp8_kernels"].state.word
    flashpatch.disable("fp8")
    kernels = linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU]
    return dict(found, after=chosen(), restored=listed == [id(kernels), *map(id, kernels)])


def products(scales: str, has_amx: bool) -> dict[str, Any]:
    """`compared`, on a CPU with AMX or without."""
    with cpu_kind(has_amx):
        return compared(scales)


def compared(scales: str) -> dict[str, Any]:
    """One layer through stock's kernel and ours: their largest errors against float64 on the same codes, and how either fails
    with a bias in bf16. With AMX stock's kernel for one scale takes one in float32 alone."""
    import torch

    import flashpatch

    torch.manual_seed(0)
    n, k = 96, 160
    weight = (torch.randn(n, k) * 0.02).to(torch.bfloat16)
    bias = torch.randn(n).to(torch.bfloat16)
    found: dict[str, Any] = {}
    for name in ("stock", "ours"):
        if name == "ours":
            flashpatch.enable("fp8")
        kernel = fp8_kernel(scales, n, k)
        amax = weight.float().abs().amax(1, keepdim=True)
        scale = amax / 448 if scales == "channel" else amax.max() / 448
        layer = fp8_layer((weight.float() / scale).to(torch.float8_e4m3fn), scale)
        operand = layer.weight.double().t() * layer.weight_scale.double()
        kernel.process_weights_after_loading(layer)
        for shape in ((1, k), (9, k), (2, 5, k)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(torch.bfloat16)
            codes, x_scale = kernel.quant_fp8.forward_native(x.view(-1, k))
            codes = codes[: x[..., 0].numel()]  # stock pads with rows of zeros
            exact = (codes.double() * x_scale.double()) @ operand.t()
            error = updates.error(lambda of=kernel, layer=layer, x=x: of.apply_weights(layer, x, bias))
            got = kernel.apply_weights(layer, x, bias.float() if error else bias)
            size = exact.abs() + bias.double().abs()
            gap = ((got.double().view(-1, n) - exact - bias.double()).abs() / size).max()
            found[f"{name} {shape}"] = [list(got.shape), float(gap), error]
    flashpatch.disable("fp8")
    return found


def poisoned() -> list[bool]:
    """Which channels answer NaN when one weight is NaN, with a scale per channel."""
    import torch

    import flashpatch

    flashpatch.enable("fp8")
    kernel = fp8_kernel("channel", 4, 8)
    weight = torch.ones(4, 8)
    weight[2, 3] = torch.nan
    layer = fp8_layer(weight.to(torch.float8_e4m3fn), torch.ones(4, 1))
    kernel.process_weights_after_loading(layer)
    flashpatch.disable("fp8")
    return kernel.apply_weights(layer, torch.ones(2, 8, dtype=torch.bfloat16)).isnan().any(0).tolist()


def int8_inputs(packed: bool) -> dict[str, Any]:
    """vLLM's int8 kernel on inputs of two and three dimensions, with and without the family."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel
    from vllm.model_executor.kernels.linear.scaled_mm import cpu
    from vllm.utils.torch_utils import set_default_torch_dtype

    import flashpatch

    asked, cpu.check_cpu_sgl_kernel = cpu.check_cpu_sgl_kernel, lambda n, k, dtype: packed
    with set_current_vllm_config(VllmConfig()), set_default_torch_dtype(torch.bfloat16):
        kernel = init_int8_linear_kernel(True, False, True, "test")
        torch.manual_seed(0)
        layer = torch.nn.Module()
        weight = torch.randint(-127, 128, (64, 64), dtype=torch.int8)
        scale = torch.rand(64, 1, dtype=torch.float32)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        layer.bias, layer.logical_widths, layer.input_scale = None, [64], None
        kernel.process_weights_after_loading(layer)
    cpu.check_cpu_sgl_kernel = asked
    x = torch.randn(2, 3, 64).to(torch.bfloat16)
    flat = kernel.apply_weights(layer, x.view(6, 64))
    stock = updates.error(lambda: kernel.apply_weights(layer, x))
    flashpatch.enable("fp8")
    kernel.linear_method = getattr(kernel, kernel.linear_method.__name__)  # bound anew, as by a new engine
    got = kernel.apply_weights(layer, x)
    flashpatch.disable("fp8")
    kernel.linear_method = getattr(kernel, kernel.linear_method.__name__)
    return dict(
        stock=stock,
        shape=list(got.shape),
        same=torch.equal(got.view(6, 64), flat),
        undone=updates.error(lambda: kernel.apply_weights(layer, x)) == stock,
    )


def deepseek(model: str) -> str | None:
    """Why an engine on it does not open on a CPU with AMX."""
    from vllm_lab import engines

    import flashpatch

    def opens() -> None:
        with engines.open_llm(model):
            pass

    flashpatch.enable("bf16")
    with cpu_kind(has_amx=True):
        error = updates.error(opens)
    flashpatch.disable("bf16")
    return error


# --- the tests


@pytest.mark.parametrize("has_amx", [False, True])
def test_ours_is_chosen_while_the_family_is_on(runner: scenario.Runner, has_amx: bool) -> None:
    found = runner(choices, has_amx)
    expected = dict(STOCK[has_amx])
    if expected["tensor"] not in found["stock"]:  # before vLLM 0.31
        expected["tensor"] = _TENSOR
    assert found["before"] == found["after"] == expected and found["restored"]
    assert found["on"] == dict(channel=OURS, tensor=OURS) and found["state"] == "installed"


@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_ours_is_as_exact_as_stock(runner: scenario.Runner, scales: str, has_amx: bool) -> None:
    if has_amx and not environment.packed_ops():
        pytest.skip("this CPU's build of vLLM has no fp8 kernel on packed weights")
    found = runner(products, scales, has_amx)
    fails = has_amx and scales == "tensor" and version_of("vllm") >= Version("0.31")
    for shape in ((1, 160), (9, 160), (2, 5, 160)):
        (ours, gap, none), (stock, other, error) = found[f"ours {shape}"], found[f"stock {shape}"]
        assert ours == stock == [*shape[:-1], 96] and none is None
        assert gap <= 2.1 * 2**-8, f"{shape}: ours is {gap:.3g} off, stock {other:.3g}"
        assert ("scalar type Float" in (error or "")) == fails, (
            f"upstream has changed: see remove_when; {error}"
        )


def test_a_nan_weight_makes_its_channel_nan(runner: scenario.Runner) -> None:
    assert runner(poisoned) == [False, False, True, False]


@pytest.mark.parametrize("packed", [False, True], ids=["oneDNN", "packed"])
def test_int8_takes_inputs_of_three_dimensions(runner: scenario.Runner, packed: bool) -> None:
    if packed and not environment.packed_ops():
        pytest.skip("this CPU's build of vLLM has no packed int8 kernel")
    found = runner(int8_inputs, packed)
    assert found["same"] and found["shape"] == [2, 3, 64] and found["undone"]
    if packed and version_of("vllm") >= Version("0.31"):  # the operator of 0.24 takes them
        assert found["stock"] is not None and "2D" in found["stock"], (
            "upstream has been fixed: see remove_when"
        )


@pytest.mark.vllm(least="0.29")  # older ones fail themselves when such a model opens on a CPU
def test_deepseek_on_amx_is_refused_when_it_opens(runner: scenario.Runner) -> None:
    error = runner(deepseek, updates.checkpoint("deepseek-v2", 0))
    assert error is not None and "PatchError" in error and "AMX_MLA" in error and "CPU_MLA" in error
