"""Calls of Python that a captured graph keeps as one, as it would a kernel."""

import functools
from collections.abc import Callable, Iterator
from typing import Any


def whole(function: Callable) -> Callable:
    """Return the function so that a graph keeps each call of it as one, with the tensors of that call.

    What it reads from the device it reads again at each replay, so it may branch on values, as a kernel may."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        import fake_cuda_redirect

        if not fake_cuda_redirect.begin():
            return function(*arguments, **keywords)
        again = None
        try:
            result = function(*arguments, **keywords)
            again = functools.partial(_repeat, function, arguments, keywords, result)
            return result
        finally:
            fake_cuda_redirect.end(again)

    return call


def _repeat(function: Callable, arguments: tuple, keywords: dict, result: Any) -> None:
    """Call the function again and put its results where those of the capture are."""
    for kept, fresh in zip(_tensors(result), _tensors(function(*arguments, **keywords)), strict=True):
        if kept.data_ptr() != fresh.data_ptr():
            kept.copy_(fresh)


def _tensors(result: Any) -> Iterator[Any]:
    import torch

    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)
