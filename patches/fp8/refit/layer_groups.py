"""Divide a model's modules into the layers that are processed together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashpatch.patches.fp8.refit.layer import Layer
from flashpatch.patches.fp8.refit.pristine_params import PristineParam, record


def group_layers(
    model: torch.nn.Module,
    device: torch.device,
    deferred: Callable[[torch.nn.Module], bool],
    processes: Callable[[torch.nn.Module], bool] = lambda module: True,
    borrows: Callable[[torch.nn.Module], bool] = lambda module: True,
) -> list[Layer]:
    """Group modules that share memory; every other module with tensors is a layer by itself.

    Args:
        model: just constructed, nothing loaded.
        device: where the weights live.
        deferred: whether a module is processed after all others.
        processes: whether post-processing does anything to a module.
        borrows: whether a foreign resource that it makes may point into the module's tensors.

    Raises:
        PatchError: a parameter has no shape before it is loaded.
    """
    modules = dict(model.named_modules())
    params = record(modules, device)
    group: dict[int, set[int]] = {}
    by_storage: dict[int, int] = {}
    for param in params:
        first = by_storage.setdefault(id(param.storage), id(param.module))
        merged = group.setdefault(first, {first}) | group.setdefault(id(param.module), {id(param.module)})
        group.update(dict.fromkeys(merged, merged))
    layers, placed = [], set()
    of_module: dict[int, list[PristineParam]] = {}
    for param in params:
        of_module.setdefault(id(param.module), []).append(param)
    for module in modules.values():
        if id(module) in placed:
            continue
        members = group.get(id(module), {id(module)})
        placed |= members
        together = [m for m in modules.values() if id(m) in members] if len(members) > 1 else [module]
        own = [param for member in together for param in of_module.get(id(member), ())]
        last = any(deferred(m) for m in together)
        if own or last:
            layers.append(
                Layer(together, own, last, any(map(processes, together)), any(map(borrows, together)))
            )
    return layers


def release_removed(model: torch.nn.Module, layers: list[Layer]) -> list[torch.nn.Module] | None:
    """Remove, in place, the layers whose modules have left the model: engines share a target's with its drafter.

    Returns:
        The modules that no layer owns now, or None if nothing has left.
    """
    present = {id(module) for module in model.modules()}
    kept = [layer for layer in layers if any(id(module) in present for module in layer.modules)]
    if len(kept) == len(layers):
        return None
    layers[:] = kept
    own = {id(module) for layer in layers for module in layer.modules}
    foreign = [m for m in model.modules() if id(m) not in own and (m._parameters or m._buffers)]
    return [*layers_and_parents(model, layers), *foreign]


def layers_and_parents(model: torch.nn.Module, layers: list[Layer]) -> list[torch.nn.Module]:
    """Return the modules that are layers, and every module above one."""
    layered = {id(module) for layer in layers for module in layer.modules}
    return [m for m in model.modules() if any(id(below) in layered for below in m.modules())]
