"""Show loaders staged tensors in place of those in use, module by module.

A loader may ask for any tensor by its name, so each bucket shows a whole model. The loops here make no call per module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.layer import Layer

Tables = tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]
"""A module's parameters and its buffers."""


class StagedTables:
    """What loaders are shown of one module.

    Args:
        module: it.
        parameters, buffers: the staged tensors. Parameters that are not staged are None; buffers stay those in use.

    Attributes:
        live: the module's own tables while others are shown, else None.
    """

    __slots__ = ("buffers", "live", "module", "parameters")

    def __init__(self, module: torch.nn.Module, parameters: dict, buffers: dict) -> None:
        self.module, self.parameters, self.buffers = module, parameters, buffers
        self.live: Tables | None = None


def show(layers: Iterable[Layer]) -> None:
    """Put the staged tables in place; those in use are set aside untouched."""
    for layer in layers:
        for one in layer.tables:
            state = one.module.__dict__
            one.live = state["_parameters"], state["_buffers"]
            state["_parameters"] = {**one.parameters}
            state["_buffers"] = {**state["_buffers"], **one.buffers}


def show_live(layers: Iterable[Layer]) -> None:
    """Put back exactly what was there before `show`; nothing where that has been done."""
    for layer in layers:
        for one in layer.tables:
            if one.live is not None:
                state = one.module.__dict__
                state["_parameters"], state["_buffers"] = one.live
                one.live = None


def replaced(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers in whose tables that are shown another object is in the place of a staged tensor."""
    found = []
    for layer in layers:
        for one in layer.tables:
            if one.live is None:
                continue
            state = one.module.__dict__
            for staged, shown in ((one.parameters, state["_parameters"]), (one.buffers, state["_buffers"])):
                for key in staged:
                    if staged[key] is not None and (key not in shown or shown[key] is not staged[key]):
                        found.append(layer)
    return found


def live_storages(
    model: torch.nn.Module, layers: Iterable[Layer], others: Iterable[torch.Tensor]
) -> dict[int, str]:
    """Return storage identity to name, for every parameter and buffer in use with memory of its own, and other tensors."""
    storages = {tensor.untyped_storage()._cdata: "a tensor that is no parameter" for tensor in others}
    live = {id(one.module): one.live for layer in layers for one in layer.tables if one.live}
    for path, module in model.named_modules():
        for table in live.get(id(module), (module._parameters, module._buffers)):
            for key, tensor in table.items():
                if tensor is not None and not hasattr(tensor, "__tensor_flatten__"):
                    storages[tensor.untyped_storage()._cdata] = f"{path}.{key}"
    return storages
