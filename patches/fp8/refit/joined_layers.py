"""Follow layers that have come to share memory in the first load: an engine may tie what is equal.

vLLM builds a tied model untied if its checkpoint holds a head of its own, and ties the two again once it finds them
equal. A trainer sends one of them, or both.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashpatch.patches.fp8.refit.errors import update_error
from flashpatch.patches.fp8.refit.fold import Plan
from flashpatch.patches.fp8.refit.layer import Layer


class JoinedLayers:
    """The memory that layers of one model share, and what the open update brings for it.

    Args:
        target: name of the model's class, for errors.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        # storage -> by layer its new values and their name
        self._values: dict[int, dict[Layer, tuple[torch.Tensor, str]]] = {}

    def note(self, layers: Iterable[Layer]) -> None:
        """Note which of ``layers`` share memory now."""
        owners: dict[int, set[int]] = {}
        for layer in layers:
            for param in layer.params:
                live = param.live()
                if live is not None and live.numel():
                    owners.setdefault(live.untyped_storage()._cdata, set()).add(id(layer))
        self._values = {storage: {} for storage, layers in owners.items() if len(layers) > 1}

    def restart(self) -> None:
        """Forget what has come."""
        self._values = {storage: {} for storage in self._values}

    def forget(self, layer: Layer) -> None:
        """Forget what has come for one layer."""
        for came in self._values.values():
            came.pop(layer, None)

    def check(self, layer: Layer, plan: Plan, last: bool) -> bool:
        """Note the new values of a layer; check that layers which share memory are given the same ones.

        Args:
            layer: that a plan was made for.
            plan: brings the values.
            last: none of them comes again in this update; else only `compare` tells.

        Returns:
            Whether the plan brings nothing but values that shared memory holds already.

        Raises:
            PatchError: they were given different values.
        """
        known = copies = 0
        for live, fresh, name in plan.copies() if self._values else ():
            copies += 1
            storage = live.untyped_storage()._cdata
            if storage not in self._values:
                continue
            came = self._values[storage]
            if not came:
                known += torch.equal(live, fresh)
            equal = (values for values, _ in came.values() if torch.equal(values, fresh))
            came[layer] = next(equal, fresh), name  # equal ones are held once
        if last:
            self.compare()
        return 0 < known == copies

    def compare(self) -> None:
        """Compare what has come. Raises PatchError if layers that share memory were given different values."""
        for came in self._values.values():
            (values, name), *others = came.values() or [(None, "")]
            for different in (other for held, other in others if held is not values):
                raise update_error(
                    f"{different} and {name} were equal when the engine was opened and share memory since, but were "
                    "given different values",
                    "Open a new engine on them.",
                    self._target,
                )

    def followers(self, layers: list[Layer]) -> list[Layer]:
        """Return the layers of which nothing came, while all that they need came for another that shares its memory."""
        if not self._values:
            return []
        came = {
            _place(param.live())
            for layer in layers
            if layer.processed_in
            for param in layer.params
            if param.required
        }

        def follows(layer: Layer) -> bool:
            needed = [param for param in layer.params if param.required]
            return bool(needed) and all(
                (live := param.live()) is not None
                and _place(live) in came
                and (live.shape, live.dtype) == (param.shape, param.dtype)
                for param in needed
            )

        return [layer for layer in layers if not (layer.processed_in or layer.written) and follows(layer)]


def _place(tensor: torch.Tensor | None) -> tuple | None:
    if tensor is None or not tensor.numel():
        return None
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
