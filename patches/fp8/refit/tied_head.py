"""Compare a head that comes for a model whose head is tied with the embedding: loaders pass over it.

A trainer may send ``lm_head.weight`` of a tied model too. If it holds other values, as one that was trained by itself does,
an engine that drops it answers by another policy than the trainer's.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flashpatch.patches._shared import fingerprint
from flashpatch.patches.fp8.refit.errors import update_error
from flashpatch.patches.fp8.refit.layer import Layer

_HEAD = "lm_head.weight"


class TiedHead:
    """What the open update brings for a head and for the embedding that it was tied to at construction.

    Args:
        model: just constructed.
        layers: its layers.
    """

    def __init__(self, model: torch.nn.Module, layers: list[Layer]) -> None:
        tensor = _embedding(model)
        self._layers = layers
        owners = ((layer, param) for layer in layers for param in layer.params)
        self._owner = next((both for both in owners if tensor is not None and both[1].live() is tensor), None)
        self._target = type(model).__name__
        self._came: dict[bool, tuple[str, tuple]] = {}  # whether it is the head -> name; shape and values
        self._held: tuple | None = None  # shape and values of the embedding that was committed last

    def note(self, name: str, tensor: torch.Tensor, last: bool) -> None:
        """Note what a loader has just been given; ``last``: neither comes again in this update, else only `compare` tells.

        Raises:
            PatchError: the head and the embedding have different values.
        """
        if self._owner is None:
            return
        param = self._owner[1]
        is_head = name.endswith(_HEAD)
        # a loader that draws all tensors before it loads one has written nothing yet
        named = name.split(".")[-2:] == param.name.split(".")[-2:] or name in param.coverage.names.values()
        if not (is_head or named):
            return
        with _disable_current_modes():  # a sender may give one of the two in another precision
            self._came[is_head] = name, (tuple(tensor.shape), fingerprint.of(tensor, dtype=param.dtype))
        if last and len(self._came) == 2:
            self.compare()

    def compare(self) -> None:
        """Compare what has come, once all has.

        Raises:
            PatchError: the head and the embedding have different values, or it is not known what came for the embedding.
        """
        if True not in self._came or self._owner is None:
            return
        if False not in self._came and self._owner[0].processed_in:
            raise update_error(
                f"this engine was opened with {self._came[True][0]} tied to {self._owner[1].name}, and under which name that "
                "came was not seen, so that the two could not be compared",
                f"Leave {self._came[True][0]} out.",
                self._target,
            )
        if False in self._came and self._came[True][1] != self._came[False][1]:
            raise update_error(
                f"{self._came[True][0]} and {self._came[False][0]} have different values, and this engine was opened with the "
                "two tied",
                "Open a new engine with tie_word_embeddings=False in its config, or send a head that equals the embedding.",
                self._target,
            )

    @property
    def waiting(self) -> list[str]:
        """What a head that is not the embedding in use waits for, if no embedding has come in this update."""
        if self._owner is None or True not in self._came:
            return []
        name, values = self._came[True]
        came = self._owner[0].processed_in or self._owner[1].written
        return [] if came or values == self._held else [f"an embedding equal to {name}, which is tied to it"]

    @property
    def alone(self) -> bool:
        """Whether nothing else has come: then it may belong to the last update, whose policy is not the sender's."""
        since = self._held is not None and bool(self.waiting)
        return since and not any(layer.written or layer.processed_in for layer in self._layers)

    def keep(self) -> None:
        """Note that the update is committed."""
        if self._owner is not None and self._owner[0].processed_in:
            self._held = self._came[False][1] if False in self._came else None

    def restart(self, came: Collection[str] = ()) -> None:
        """Forget what has come, but for tensors named in ``came``."""
        self._came = {which: item for which, item in self._came.items() if item[0] in came}


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
