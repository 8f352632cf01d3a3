"""Check what an update brings for tensors that belong together: layers that share memory, a tied head, scales of a cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from flashpatch.errors import PatchError
from flashpatch.patches._shared import fingerprint
from flashpatch.patches.fp8.update.events import listed, update_error
from flashpatch.patches.fp8.update.layer import Layer
from flashpatch.patches.fp8.update.process import LayerState, Plan
from flashpatch.patches.fp8.update.tensors import PristineParam, Unseen

if TYPE_CHECKING:
    from flashpatch.patches.fp8.precision.quantize_on_load import Rounding
    from flashpatch.patches.fp8.update.model import LoaderAdapter
    from flashpatch.patches.fp8.update.tensors import NamedWeights


_HEAD = "lm_head.weight"


class Check:
    """What an update must hold beside being whole. What came for a layer is kept with the layer (`layer.Came`)."""

    def forget_before(self, call: int) -> None:
        """Forget what earlier calls brought that belongs to no layer."""

    def clear(self) -> None:
        """Expect another update."""

    def refusal(self) -> PatchError | None:
        """Return why what came may not be put in place, or None; asked when all has come."""
        return None

    def committed(self) -> None:
        """Note that what came is in place."""


class JoinedLayers(Check):
    """Layers that have come to share memory in the first load must be given the same values.

    vLLM builds a tied model untied if its checkpoint holds a head of its own, and ties the two again once it finds them
    equal. A trainer sends one of them, or both.

    Args:
        target: name of the model's class, for errors."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._owners: dict[int, list[Layer]] = {}  # storage -> the layers that share it

    def find(self, layers: Iterable[Layer]) -> None:
        """Find which of ``layers`` share memory now."""
        owners: dict[int, dict[Layer, None]] = {}
        for layer in layers:
            for param in layer.params:
                live = param.live()
                if live is not None and live.numel():
                    owners.setdefault(live.untyped_storage()._cdata, {})[layer] = None
        self._owners = {storage: list(sharing) for storage, sharing in owners.items() if len(sharing) > 1}

    def planned(self, layer: Layer, plan: Plan) -> bool:
        """Note a layer that was processed; return whether ``plan`` brings nothing but values that shared memory holds already."""
        known = 0
        for live, fresh, name in plan.copies() if self._owners else ():
            storage = live.untyped_storage()._cdata
            if storage in self._owners:
                given = self._given(storage)
                known += not given and torch.equal(live, fresh)
                equal = (values for values, _ in given if torch.equal(values, fresh))  # these are held once
                layer.came.shared[storage] = next(equal, fresh), name
        return 0 < known == len(plan.copies())

    def refusal(self) -> PatchError | None:
        for storage in self._owners:
            (values, name), *others = self._given(storage) or [(None, "")]
            for different in (other for held, other in others if held is not values):
                return update_error(
                    f"{different} and {name} were equal when the engine was opened and share memory since, but were "
                    "given different values",
                    "Open a new engine on them.",
                    self._target,
                )
        return None

    def followers(self, layers: list[Layer]) -> list[Layer]:
        """Return the layers of which nothing came, while all that they need came for another that shares its memory."""
        if not self._owners:
            return []
        came = {
            _place(param.live())
            for layer in layers
            if layer.came.processed
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

        return [layer for layer in layers if not (layer.came.processed or layer.written) and follows(layer)]

    def _given(self, storage: int) -> list[tuple[torch.Tensor, str]]:
        owners = self._owners[storage]
        return [layer.came.shared[storage] for layer in owners if storage in layer.came.shared]


def _place(tensor: torch.Tensor | None) -> tuple | None:
    if tensor is None or not tensor.numel():
        return None
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


class CachedScales(Check):
    """New scales that a KV cache, or a captured graph, would not follow are refused.

    Args:
        layers, layer_state, adapter: of the model.
        keeps_cache: requests that run go on with what they have cached."""

    def __init__(
        self, layers: list[Layer], layer_state: LayerState, adapter: LoaderAdapter, keeps_cache: bool
    ) -> None:
        self._layers = layers
        self._layer_state = layer_state
        self._adapter = adapter
        self._keeps_cache = keeps_cache
        self._came: dict[Layer, None] = {}  # layers with such scales that came

    def staged(self, layer: Layer) -> None:
        """Note a layer whose values are all staged."""
        written = [param for param in layer.scales() if param.written]
        if written:
            layer.came.scales = [(param, param.copy_small(param.tensor)) for param in written]
            self._came[layer] = None

    def clear(self) -> None:
        self._came.clear()

    def committed(self) -> None:
        for layer in self._came:
            for param, values in layer.came.scales:
                param.loaded = values

    def refusal(self) -> PatchError | None:
        changed = {layer: names for layer in self._came if (names := _changed(layer))}
        if not changed or not self._adapter.quantized_cache():
            return None
        cached = sorted(name for layer, names in changed.items() if layer.deferred for name in names)
        if cached and self._keeps_cache and self._adapter.busy():
            return update_error(
                f"{listed(cached)} changed while requests run whose KV was quantized with the old values",
                "Set the option in_flight to recompute.",
            )
        neighbours = any(not layer.deferred for layer in changed)  # of which attention, nothing tells
        readers = [layer for layer in self._layers if layer.deferred and (neighbours or layer in changed)]
        derived = sorted(name for layer in readers for name in layer.derived_later(self._layer_state))
        if not derived or not self._adapter.captured():
            return None
        names = sorted(name for names in changed.values() for name in names)
        return update_error(
            f"{listed(names)} changed, and {listed(derived)}, derived from them, is a constant of captured CUDA graphs",
            "Open the engine with cudagraph_mode=PIECEWISE.",
        )


def _changed(layer: Layer) -> list[str]:
    return [
        param.name
        for param, values in layer.came.scales
        if values is not None and (param.loaded is None or not torch.equal(param.loaded, values))
    ]


class TiedHead(Check):
    """A head that comes for a model whose head is tied at construction must equal the embedding: loaders pass over it.

    An engine that drops a head with other values answers by another policy than the trainer's.

    Args:
        model: just constructed.
        layers: its layers.

    Attributes:
        exists: whether the head is tied."""

    def __init__(self, model: torch.nn.Module, layers: list[Layer]) -> None:
        tensor = _embedding(model)
        owners = (param for layer in layers for param in layer.params)
        self._param = next((one for one in owners if tensor is not None and one.live() is tensor), None)
        self.exists = self._param is not None
        self._target = type(model).__name__
        # whether it is the head -> name, call, and shape and values
        self._came: dict[bool, tuple[str, int, tuple]] = {}
        self._held: tuple | None = None  # shape and values of the embedding that was committed last

    def tensor(self, name: str, tensor: torch.Tensor, call: int) -> None:
        """Note what a loader has just been given."""
        param = self._param
        is_head = name.endswith(_HEAD)
        # a loader that draws all tensors before it loads one has written nothing yet
        named = name.split(".")[-2:] == param.name.split(".")[-2:] or name in param.coverage.names.values()
        if is_head or named:
            with Unseen():  # a sender may give one of the two in another precision
                values = tuple(tensor.shape), fingerprint.of(tensor, dtype=param.dtype)
            self._came[is_head] = name, call, values

    def refusal(self) -> PatchError | None:
        if True not in self._came or self._param is None:
            return None
        head = self._came[True][0]
        if False not in self._came and self._param.layer.came.processed:
            return update_error(
                f"this engine was opened with {head} tied to {self._param.name}, and under which name that "
                "came was not seen, so that the two could not be compared",
                f"Leave {head} out.",
                self._target,
            )
        if False in self._came and self._came[True][2] != self._came[False][2]:
            return update_error(
                f"{head} and {self._came[False][0]} have different values, and this engine was opened with the two tied",
                "Open a new engine with tie_word_embeddings=False in its config, or send a head that equals the embedding.",
                self._target,
            )
        return None

    @property
    def missing(self) -> list[str]:
        """Return what a head that is not the embedding in use needs, if no embedding has come in this update."""
        if self._param is None or True not in self._came:
            return []
        name, _, values = self._came[True]
        came = self._param.layer.came.processed or self._param.layer.written
        return [] if came or values == self._held else [f"an embedding equal to {name}, which is tied to it"]

    def forget_before(self, call: int) -> None:
        self._came = {which: item for which, item in self._came.items() if item[1] == call}

    def clear(self) -> None:
        self._came = {}

    def committed(self) -> None:
        if self._param is not None and self._param.layer.came.processed:
            self._held = self._came[False][2] if False in self._came else None


def _embedding(model: torch.nn.Module) -> torch.Tensor | None:
    """Return the embedding that stands for the head too, None if the model has no tied head here."""
    named = list(model.named_parameters(remove_duplicate=False))
    head = next((tensor for name, tensor in named if name.endswith(_HEAD)), None)
    if head is not None:
        return head if sum(tensor is head for _, tensor in named) > 1 else None
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    on_another_stage = any(path.endswith("lm_head") for path, _ in model.named_modules())
    if on_another_stage or not getattr(config, "tie_word_embeddings", False):
        return None
    return next((tensor for name, tensor in named if name.endswith("embed_tokens.weight")), None)


class WideWeights:
    """Follow the writes of one model's loaders.

    Args:
        rounding: rounds what comes into 8-bit parameters; None if nothing is.

    Attributes:
        names: of weights that came in float32 and must not be rounded to bf16; None if it cannot be told, as a loader wrote
            what is no copy of the weight that came last."""

    def __init__(self, rounding: Rounding | None) -> None:
        self.names: set[str] | None = set()
        self._rounding = rounding

    def note(self, weights: NamedWeights, param: PristineParam, source: torch.Tensor | None) -> None:
        """Note one write of a call that has brought float32.

        Args:
            weights: those that come.
            param: what is written to.
            source: see `WriteTracker`."""
        last, rounded = weights.tensor, self._rounding is not None and self._rounding.from_bf16
        if rounded or source is None or self.names is None or last is None:
            return
        if not 0 <= source.data_ptr() - last.data_ptr() < max(last.nbytes, 1):
            self.names = None
        elif param.dtype != torch.bfloat16:
            self.names.add(weights.current)
