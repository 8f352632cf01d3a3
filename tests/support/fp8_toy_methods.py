"""Post-process a toy linear layer in the ways of vLLM's kernels, and load its parameter as vLLM's loaders do.

Each of `METHODS` leaves the weights somewhere else: in a closure, in a packed buffer, behind a handle, in a tuple."""

import functools

import torch
from torch import nn


def load_whole(param: nn.Parameter, loaded: torch.Tensor) -> None:
    assert param.shape == loaded.shape, f"{tuple(param.shape)} is not {tuple(loaded.shape)}"
    param.data.copy_(loaded)


def load_shard(param: nn.Parameter, loaded: torch.Tensor, shard: int, *, rows: int) -> None:
    target = param.data.narrow(0, shard * rows, rows)
    assert target.shape == loaded.shape, f"{tuple(target.shape)} is not {tuple(loaded.shape)}"
    target.copy_(loaded)


def load_padded(param: nn.Parameter, loaded: torch.Tensor) -> None:
    param[: len(loaded)].data.copy_(loaded)
    param[len(loaded) :].data.fill_(0)


class Method:
    """Leaves the weight as it was loaded."""

    def process(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.T


class Transposed(Method):
    """The parameter is replaced by a plain one of another layout: loader, name and shape are lost."""

    def process(self, layer):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous(), requires_grad=False)

    def apply(self, layer, x):
        return x @ layer.weight


class Quantized(Method):
    """int8 rows and a scale that exists only afterwards; the module used for it hangs off the method."""

    def __init__(self) -> None:
        self.helper = nn.Identity()

    def process(self, layer):
        weight = layer.weight.detach()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-6) / 127
        layer.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        layer.register_buffer("weight_scale", scale)
        self.helper.largest = float(scale.max())

    def apply(self, layer, x):
        return (x @ (layer.weight.float() * layer.weight_scale).T) + self.helper.largest


class Closure(Method):
    """The parameter is emptied; a closure keeps the packed weight."""

    def process(self, layer):
        packed = layer.weight.detach().t().contiguous()
        layer.cpu_linear = lambda x: x @ packed
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer, x):
        return layer.cpu_linear(x)


class DefaultArgument(Method):
    """A lambda carries the packed weight as the default of an argument."""

    def process(self, layer):
        packed = layer.weight.detach().t().contiguous()
        layer.cpu_linear = lambda x, weight=packed, *, bias=packed.sum(): x @ weight + bias

    def apply(self, layer, x):
        return layer.cpu_linear(x)


class Partial(Method):
    """A functools.partial and a tuple, with a number that changes with the weights beside the tensor."""

    def process(self, layer):
        packed = layer.weight.detach().t().contiguous()
        layer.run = functools.partial(torch.matmul, other=packed)
        layer.pair = (packed * 2, float(packed.sum()))

    def apply(self, layer, x):
        doubled, total = layer.pair
        return layer.run(x) + x @ doubled + total


class Kernel:
    """Holds packed weights in a dictionary of lists."""

    def __init__(self) -> None:
        self.cache: dict[str, list] = {}


class Cached(Method):
    """A kernel object of the method keeps lists in a dictionary; a bound method of the kernel's is stored too."""

    def __init__(self) -> None:
        self.kernel = Kernel()

    def process(self, layer):
        weight = layer.weight.detach()
        self.kernel.cache = {
            "halves": [half.clone() for half in weight.T.chunk(2, dim=1)],
            "sum": [weight.sum()],
        }

    def apply(self, layer, x):
        return (
            torch.cat([x @ half for half in self.kernel.cache["halves"]], dim=1) + self.kernel.cache["sum"][0]
        )


class Handle:
    """Owns packed weights out of Python's sight, as a oneDNN handle does; they must be released exactly once."""

    memory: dict[int, torch.Tensor] = {}
    released: list[int] = []
    made = 0

    def __init__(self, weight: torch.Tensor) -> None:
        Handle.made += 1
        self.number = Handle.made
        Handle.memory[self.number] = weight.detach().clone()

    def __del__(self) -> None:
        Handle.released.append(self.number)
        del Handle.memory[self.number]


class Handled(Method):
    """A handle made by the post-processing, referred to from a closure."""

    def process(self, layer):
        handle = Handle(layer.weight)
        layer.run = lambda x: x @ Handle.memory[handle.number].T

    def apply(self, layer, x):
        return layer.run(x)


METHODS: dict[str, type[Method]] = {
    "bare": Method,
    "transposed": Transposed,
    "quantized": Quantized,
    "closure": Closure,
    "default": DefaultArgument,
    "partial": Partial,
    "cached": Cached,
    "handled": Handled,
}
