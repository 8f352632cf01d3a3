"""Find the weights that an engine holds in float32, so that a trainer may round all others to bf16 before it sends them.

Rounded before or in the engine is the same where the weight's own values are copied into bf16. The loaders show whether they
are: every write is compared with the weight that came last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the modules that register patches import this one, and need no torch
    import torch

    from flashpatch.patches.fp8.precision.quantize_on_load import Rounding
    from flashpatch.patches.fp8.refit.pristine_params import PristineParam
    from flashpatch.patches.fp8.refit.write_tracker import NamedWeights


class WideWeights:
    """Follow the writes of one model's loaders.

    Args:
        rounding: rounds what comes into 8-bit parameters; None if nothing is.

    Attributes:
        names: of weights that came in float32 and must not be rounded to bf16; None if it cannot be told, as a loader wrote
            what is no copy of the weight that came last.
    """

    def __init__(self, rounding: Rounding | None) -> None:
        self.names: set[str] | None = set()
        self._rounding = rounding
        self._came = False  # whether any weight did so in float32

    def note(self, weights: NamedWeights, param: PristineParam, source: torch.Tensor | None) -> None:
        """Note one write.

        Args:
            weights: those that come.
            param: what is written to.
            source: see `WriteTracker`.
        """
        import torch

        last = weights.tensor
        self._came |= last is not None and last.dtype in (torch.float32, torch.float64)
        if not self._came or source is None or self.names is None or last is None:
            return
        if self._rounding is not None and self._rounding.from_bf16:
            return
        if not 0 <= source.data_ptr() - last.data_ptr() < max(last.nbytes, 1):
            self.names = None
        elif param.dtype != torch.bfloat16:
            self.names.add(weights.current)


def of(found: Iterable[WideWeights]) -> list[str] | None:
    """Return the names of all of some models, for a receipt; None if it cannot be told of one."""
    names = [one.names for one in found]
    return None if None in names else sorted(set().union(*(each or () for each in names)))
