"""Which elements of a tensor have been written, exactly, without a mask where none is needed.

Weight loaders write whole tensors or rectangular slices (one shard of a fused layer, one expert). Each write
is kept as a box in the tensor's own index space; disjoint boxes add up, so completeness is a sum. Writes that
do not fit that picture fall back to a boolean mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Box = tuple[tuple[int, int], ...]  # per dimension: (first index, one past the last)


@dataclass
class Coverage:
    """Elements written to one tensor of the given ``shape`` and ``stride`` at ``offset`` in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    boxes: dict[Box, int] = field(default_factory=dict)  # box -> number of times it was written
    names: dict[Box, str] = field(default_factory=dict)  # box -> checkpoint name that wrote it first
    mask: torch.Tensor | None = None

    @property
    def total(self) -> int:
        return _volume([(0, size) for size in self.shape])

    @property
    def covered(self) -> int:
        """Number of elements written at least once."""
        if self.mask is not None:
            return int(torch.count_nonzero(self.mask))
        return sum(_volume(box) for box in self.boxes)

    def add(self, view: torch.Tensor, name: str = "") -> None:
        """Record that ``view``, which shares the tensor's storage, was written."""
        if view.numel() == 0:  # a loader's "zero the padding" where there is none
            return
        box = self._box(view)
        if box is None or self.mask is not None:
            self._paint(view)
            if box is None:
                return
        elif box not in self.boxes and any(_overlap(box, other) for other in self.boxes):
            self._to_mask()
            self._paint(view)
        self.boxes[box] = self.boxes.get(box, 0) + 1
        self.names.setdefault(box, name)

    def satisfies(self, expected: Coverage) -> bool:
        """True when everything that ``expected`` saw written has been written here as often."""
        if self.covered < expected.covered:
            return False
        return all(self.boxes.get(box, 0) >= times for box, times in expected.boxes.items() if times > 1)

    def exceeded_by(self, view: torch.Tensor, expected: Coverage | None) -> bool:
        """True when one more write of ``view`` is more often than ``expected`` saw it."""
        box = self._box(view)
        allowed = 1 if expected is None else max(1, expected.boxes.get(box, 1))
        return self.boxes.get(box, 0) >= allowed

    def missing(self, expected: Coverage | None) -> list[str]:
        """Checkpoint names of the expected boxes not written yet; empty when names are unknown."""
        if expected is None:
            return []
        names = (expected.names[box] for box in expected.boxes if box not in self.boxes)
        return list(dict.fromkeys(name for name in names if name))

    def _box(self, view: torch.Tensor) -> Box | None:
        """The rectangle ``view`` occupies in the tensor's index space, or None if it is no rectangle."""
        rest = view.storage_offset() - self.offset
        if rest < 0 or 0 in view.shape:
            return None
        if rest == 0 and view.numel() == self.total and view.is_contiguous():
            return tuple((0, size) for size in self.shape)
        order = sorted(range(len(self.shape)), key=lambda d: -self.stride[d])
        sizes = {st: size for size, st in zip(view.shape, view.stride()) if size > 1}
        if len(sizes) != sum(size > 1 for size in view.shape):
            return None
        box: list[tuple[int, int]] = [(0, 1)] * len(self.shape)
        for dim in order:
            size, step = self.shape[dim], self.stride[dim]
            start = 0
            if size > 1:
                start, rest = divmod(rest, step) if step else (0, rest)
            extent = sizes.pop(step, 1) if size > 1 else 1
            if start + extent > size:
                return None
            box[dim] = (start, start + extent)
        return None if rest or sizes else tuple(box)

    def _to_mask(self) -> None:
        self.mask = torch.zeros(self.shape, dtype=torch.bool)
        for box in self.boxes:
            self.mask[tuple(slice(*edge) for edge in box)] = True

    def _paint(self, view: torch.Tensor) -> None:
        if self.mask is None:
            self._to_mask()
        span = sum((size - 1) * step for size, step in zip(self.shape, self.stride)) + 1
        marks = torch.zeros(span, dtype=torch.bool)
        marks.as_strided(view.shape, view.stride(), view.storage_offset() - self.offset).fill_(True)
        self.mask |= marks.as_strided(self.shape, self.stride)


def _volume(box) -> int:
    volume = 1
    for first, end in box:
        volume *= end - first
    return volume


def _overlap(a: Box, b: Box) -> bool:
    return all(a0 < b1 and b0 < a1 for (a0, a1), (b0, b1) in zip(a, b))
