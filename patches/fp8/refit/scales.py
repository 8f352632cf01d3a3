"""Refuse new scales that a cache, or a captured graph, would not follow."""

from __future__ import annotations

import torch

from flashpatch.patches.fp8.refit.layer import Layer
from flashpatch.patches.fp8.refit.layer_state import LayerState
from flashpatch.patches.fp8.refit.loader_adapter import LoaderAdapter
from flashpatch.patches.fp8.refit.policy import listed
from flashpatch.patches.fp8.refit.pristine_params import PristineParam


class Scales:
    """The scales of a KV cache and of activations that the open update brings.

    Args:
        layers, layer_state, adapter: of the model.
        keeps_cache: requests that run go on with what they have cached.
    """

    def __init__(
        self, layers: list[Layer], layer_state: LayerState, adapter: LoaderAdapter, keeps_cache: bool
    ) -> None:
        self._layers = layers
        self._layer_state = layer_state
        self._adapter = adapter
        self._keeps_cache = keeps_cache
        self._came: dict[Layer, list[tuple[PristineParam, torch.Tensor | None]]] = {}

    def note(self, layer: Layer) -> None:
        """Note what was loaded into a layer, before it is processed."""
        written = [param for param in layer.scales() if param.written]
        if written:
            self._came[layer] = [(param, param.copy_small(param.tensor)) for param in written]

    def forget(self, layer: Layer) -> None:
        """Forget what was noted of a layer: it comes anew."""
        self._came.pop(layer, None)

    def clear(self) -> None:
        """Forget all that was noted."""
        self._came.clear()

    def keep(self) -> None:
        """Take what came for what the layers hold: it is in place."""
        for came in self._came.values():
            for param, values in came:
                param.loaded = values

    def refusal(self) -> str | None:
        """Return why what came may not be put in place now, or None."""
        changed = {layer: names for layer in self._came if (names := self._changed(layer))}
        if not changed or not self._adapter.quantized_cache():
            return None
        cached = sorted(name for layer, names in changed.items() if layer.deferred for name in names)
        if cached and self._keeps_cache and self._adapter.busy():
            return (
                f"{listed(cached)} changed while requests run whose KV was quantized with the old values; set the option "
                "in_flight to recompute"
            )
        neighbours = any(not layer.deferred for layer in changed)  # of which attention, nothing tells
        readers = [layer for layer in self._layers if layer.deferred and (neighbours or layer in changed)]
        derived = sorted(name for layer in readers for name in layer.derived_later(self._layer_state))
        if derived and self._adapter.captured():
            names = sorted(name for names in changed.values() for name in names)
            return (
                f"{listed(names)} changed, and {listed(derived)}, derived from them, is a constant of captured CUDA graphs; "
                "open the engine with cudagraph_mode=PIECEWISE"
            )
        return None

    def _changed(self, layer: Layer) -> list[str]:
        return [
            param.name
            for param, values in self._came[layer]
            if values is not None and (param.loaded is None or not torch.equal(param.loaded, values))
        ]
