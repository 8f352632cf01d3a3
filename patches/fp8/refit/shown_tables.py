"""Show loaders staged tensors in place of those in use.

A loader may ask for any tensor by its name, so each bucket shows a whole model: the loops here make no call per module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.layer import Layer


def show(layers: Iterable[Layer]) -> None:
    """Put staged tables in place; those in use are set aside untouched, and buffers that are not staged stay to be seen."""
    for layer in layers:
        for module, parameters, buffers in layer.tables:
            state = module.__dict__
            layer.live_tables += [(module, state["_parameters"], state["_buffers"])]
            state["_parameters"] = {**parameters}
            state["_buffers"] = {**state["_buffers"], **buffers}


def show_live(layers: Iterable[Layer]) -> None:
    """Put back exactly what was there before `show`; nothing where that has been done."""
    for layer in layers:
        for module, parameters, buffers in layer.live_tables:
            state = module.__dict__
            state["_parameters"], state["_buffers"] = parameters, buffers
        layer.live_tables = []


def replaced(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers that are shown with another object in the place of a staged tensor."""
    found = []
    for layer in layers:
        for module, parameters, buffers in layer.tables if layer.live_tables else ():
            for staged, shown in ((parameters, module._parameters), (buffers, module._buffers)):
                for key in staged:
                    if staged[key] is not None and (key not in shown or shown[key] is not staged[key]):
                        found.append(layer)
    return found


def live_storages(
    model: torch.nn.Module, layers: Iterable[Layer], others: Iterable[torch.Tensor]
) -> dict[int, str]:
    """Return storage identity to name, for every parameter and buffer in use with memory of its own, and other tensors."""
    storages = {tensor.untyped_storage()._cdata: "a tensor that is no parameter" for tensor in others}
    live = {id(module): tables for layer in layers for module, *tables in layer.live_tables}
    for path, module in model.named_modules():
        for table in live.get(id(module), (module._parameters, module._buffers)):
            for key, tensor in table.items():
                if tensor is not None and not hasattr(tensor, "__tensor_flatten__"):
                    storages[tensor.untyped_storage()._cdata] = f"{path}.{key}"
    return storages
