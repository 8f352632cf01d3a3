"""Compute checksums of the weights that an engine runs on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import torch

from flashpatch.patches._shared import fingerprint


def of_model(
    model: torch.nn.Module, deferred: Callable[[torch.nn.Module], bool], constants: Iterable[torch.Tensor]
) -> str:
    """Return a checksum of a model's weights as kernels read them, 16 hexadecimal digits.

    Two engines of one configuration have the same checksum if they hold the same bits: parameters and buffers, and
    what layers processed last derive from others. What a kernel has packed into memory of its own is not seen.

    Args:
        model: the model.
        deferred: whether a module is processed after all others.
        constants: tensors that modules held beside parameters and buffers after the first load.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_named(model, deferred, constants)):
        sums = fingerprint.of(tensor)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {sums}\n".encode())
    return digest.hexdigest()[:16]


def _named(
    model: torch.nn.Module, deferred: Callable[[torch.nn.Module], bool], constants: Iterable[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        yield from _parts(name, tensor.detach())
    known = set(map(id, constants))
    for path, module in model.named_modules():
        if deferred(module):
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and id(value) in known:
                    yield from _parts(f"{path}.{key}", value)


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
    else:
        for key in flatten()[0]:
            yield from _parts(f"{name}.{key}", getattr(tensor, key))
