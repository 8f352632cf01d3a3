"""Read and repeat calls of weight loaders, whose arguments come by position or by keyword."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def parameter_names(loader: Callable) -> tuple[str, ...]:
    """Return what ``loader`` calls its arguments, in order; a bound method's ``self`` is none."""
    return tuple(inspect.signature(loader).parameters)


class LoaderCall:
    """One call of a weight loader: first the parameter, second the tensor, then what says where it belongs.

    Args:
        names: `parameter_names` of the loader.
        args: given by position.
        kwargs: given by keyword."""

    def __init__(self, names: tuple[str, ...], args: tuple, kwargs: Mapping[str, Any]) -> None:
        self._names = names
        self._args = args
        self._kwargs = kwargs

    def at(self, index: int) -> Any:
        """Return the argument at this position, however it was given; None if it was not."""
        if index < len(self._args):
            return self._args[index]
        return self._kwargs.get(self._names[index]) if index < len(self._names) else None

    def get(self, name: str) -> Any:
        """Return the argument of this name, however it was given; None if it was not."""
        return self.at(self._names.index(name)) if name in self._names else self._kwargs.get(name)

    def place(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of everything after parameter and tensor, in the caller's order."""
        for index, value in enumerate(self._args[2:], 2):
            yield (self._names[index] if index < len(self._names) else "", value)
        for name, value in self._kwargs.items():
            if name not in self._names[:2]:
                yield name, value

    def repeat(self, loader: Callable, parameter: Any, tensor: Any, **changed: Any) -> Any:
        """Call ``loader``, which takes the same arguments, with another parameter and tensor, and the caller's other
        arguments, but for those in ``changed``, each of which the caller gave."""
        args = list(self._args[2:])
        kwargs = {name: value for name, value in self._kwargs.items() if name not in self._names[:2]}
        for name, value in changed.items():
            if name in kwargs:
                kwargs[name] = value
            else:
                args[self._names.index(name) - 2] = value
        return loader(parameter, tensor, *args, **kwargs)
