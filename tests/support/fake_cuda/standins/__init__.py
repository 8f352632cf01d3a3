"""Stand-ins on the CPU for vLLM's own CUDA operators, with the results of the real ones unless they say otherwise."""

from importlib import import_module

import torch

from fake_cuda.graphs import whole

_libraries: dict[str, torch.library.Library] = {}
_pending: list[tuple[str, object]] = []


def operator(name: str):
    """Declare the decorated function as the stand-in for the operator ``namespace::name``."""

    def declare(function):
        _pending.append((name, function))
        return function

    return declare


def register() -> None:
    """Put every stand-in over the operator of its name; what this version of vLLM does not define is left out."""
    for module in ("experts", "forward", "products", "rounding", "weight_layouts"):
        import_module(f"{__name__}.{module}")
    for name, function in _pending:
        namespace, _, operator_name = name.partition("::")
        if not hasattr(getattr(torch.ops, namespace), operator_name):
            continue
        library = _libraries.get(namespace)
        if library is None:
            library = _libraries[namespace] = torch.library.Library(namespace, "IMPL")
        library.impl(operator_name, whole(function), "CUDA", allow_override=True)
    _pending.clear()
