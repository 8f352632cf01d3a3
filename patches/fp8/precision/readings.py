"""Ask a device about many tensors together: each operator is a launch there, and reading a number waits for it.

On a CPU, where nothing is waited for, all is read at once."""

from __future__ import annotations

import math

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.precision import quantize
from flashpatch.patches.fp8.update.tensors import Unseen

_SMALL = 1 << 18  # bytes of a tensor up to which it is kept, to be looked at with others


class Readings:
    """What is asked about the tensors of one model, and not read yet."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was asked."""
        self._largest: list[tuple[torch.Tensor, str]] = []
        self._small: dict[torch.dtype, list[tuple[torch.Tensor, str]]] = {}

    def finite(self, tensor: torch.Tensor, name: str) -> None:
        """Require that no element is NaN or infinite, at the latest in `check`, which raises; until then it stays as it is."""
        data = tensor.detach()
        if not data.dtype.is_floating_point or data.numel() == 0:
            return
        if data.is_cpu:
            # NaN and infinity stay in any sum, which is twice as fast as the extremes, but may leave the range of its type.
            if data.dtype.itemsize == 1 or not math.isfinite(data.sum().item()):
                _require_finite(quantize.largest(data).item(), name)
            return
        if data.dim() and data.nbytes <= _SMALL and data.dtype.itemsize > 1:
            self._small.setdefault(data.dtype, []).append((data, name))
        else:
            self._largest.append((quantize.largest(data), name))

    def launch(self) -> None:
        """Look at the small tensors now, without waiting: what processes them may free their memory. Called outside of modes."""
        small, self._small = self._small, {}
        for tensors, names in [zip(*kept) for kept in small.values()]:
            wide = quantize.wide(tensors[0].dtype)
            self._largest += zip(torch._foreach_norm(tensors, torch.inf, dtype=wide), names)

    def check(self) -> None:
        """Read whether all that came is finite; wait for the device once. Raises PatchError if it is not; a tensor is
        named."""
        if not (self._small or self._largest):
            return
        with Unseen():
            self.launch()
            asked, self._largest = self._largest, []
            values = torch.stack([largest for largest, _ in asked]).tolist()
        for value, (_, name) in zip(values, asked):
            if not math.isfinite(value):
                _require_finite(value, name)


def _require_finite(value: float, name: str) -> None:
    if not math.isfinite(value):
        raise PatchError(
            f"{name} holds NaN or Inf values",
            patch="fp8.update",
            advice="The update is abandoned: find where the trainer's weights diverged.",
        )
