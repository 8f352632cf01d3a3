"""Ask a device about many tensors together: each operator is a launch there, and reading a number waits for it.

On a CPU, where nothing is waited for, all is read at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.precision import quantize
from flashpatch.patches.fp8.update.tensors import Unseen

_SMALL = 1 << 18  # bytes of a tensor up to which it is kept, to be looked at with others
_HELD = 1 << 23  # bytes of weights that are kept
_ROWS = 16  # of a weight, in which its error is measured


class Readings:
    """What is asked about the tensors of one model, and not read yet.

    Attributes:
        errors: layer (with the shard of a fused one) to the relative error with which it was rounded last."""

    def __init__(self) -> None:
        self.errors: dict[str, float] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what was asked."""
        self._largest: list[tuple[torch.Tensor, str]] = []
        self._small: dict[torch.dtype, list[tuple[torch.Tensor, str]]] = {}
        self._samples: dict[tuple, list[tuple[torch.Tensor, torch.Tensor | None, Callable]]] = {}
        self._measured: list[tuple[torch.Tensor, Sequence[Callable]]] = []
        self._held = 0

    def finite(self, tensor: torch.Tensor, name: str) -> torch.Tensor | None:
        """Require that no element is NaN or infinite, at the latest in `check`, which raises; until then it stays as it
        is. Return the largest magnitude, float32 [], if it has been launched."""
        data = tensor.detach()
        if not data.dtype.is_floating_point or data.numel() == 0:
            return None
        if data.is_cpu:
            # NaN and infinity stay in any sum, which is twice as fast as the extremes, but may leave the range of its type.
            if data.dtype.itemsize == 1 or not math.isfinite(data.sum().item()):
                _require_finite(quantize.largest(data).item(), name)
            return None
        if data.dim() and data.nbytes <= _SMALL and data.dtype.itemsize > 1:
            self._small.setdefault(data.dtype, []).append((data, name))
            return None
        self._largest.append((quantize.largest(data), name))
        return self._largest[-1][0]

    def error(
        self, w: torch.Tensor, how: tuple[str, str], note: Callable, largest: torch.Tensor | None = None
    ) -> None:
        """Give ``note``, at the latest in `read`, ``|w - q * scale| / |w|`` of a weight that is rounded; 0 for zeros.

        It is measured on at most 16 rows that lie evenly apart.

        Args:
            w: [out, in], any floating dtype.
            how: form and granularity, see `quantize.quantized`.
            note: receives the error.
            largest: magnitude of all of it, float32 [], if it is known."""
        rows = w.detach()[:: -(-w.shape[0] // _ROWS)].clone()
        if how[1] == "tensor" and largest is None:
            largest = quantize.largest(w)
        if rows.is_cpu:
            _give(_errors([rows], [largest], how), [note])
            return
        self._samples.setdefault((how, rows.shape, rows.dtype), []).append((rows, largest, note))
        self._held += rows.nbytes
        if self._held > _HELD:
            self._measure()

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

    def read(self) -> None:
        """Do what `check` does, and give all errors away."""
        self.check()
        self._measure()
        measured, self._measured = self._measured, []
        if measured:
            found, notes = zip(*measured)
            with Unseen():
                _give(torch.cat(found, dim=1), [note for group in notes for note in group])

    def _measure(self) -> None:
        samples, self._samples, self._held = self._samples, {}, 0
        with Unseen():
            for (how, *_), group in samples.items():
                rows, largest, notes = zip(*group)
                self._measured.append((_errors(rows, largest, how), notes))


def _require_finite(value: float, name: str) -> None:
    if not math.isfinite(value):
        raise PatchError(
            f"{name} holds NaN or Inf values",
            patch="fp8.update",
            advice="The update is abandoned: find where the trainer's weights diverged.",
        )


def _errors(samples: Sequence[torch.Tensor], largest: Sequence, how: tuple[str, str]) -> torch.Tensor:
    """Return how much rounding takes from n samples [r, k] of one shape, and how much there is: [2, n]."""
    rows, dtype = torch.stack(list(samples)).float(), quantize.DTYPES[how[0]]
    amax = quantize.row_amax(rows) if how[1] == "channel" else torch.stack(list(largest)).view(-1, 1, 1)
    scale = quantize.scales(amax, dtype)
    values = quantize.rounded_to(rows, scale, dtype).float()
    gap = torch.addcmul(rows, values, scale, value=-1, out=values)
    return torch.stack([torch.linalg.vector_norm(one, dim=(1, 2)) for one in (gap, rows)])


def _give(errors: torch.Tensor, notes: Sequence[Callable]) -> None:
    for note, (gap, size) in zip(notes, errors.t().tolist()):
        note(gap / size if size > 0 else 0.0)
