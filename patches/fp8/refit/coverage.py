"""Record exactly which elements of a tensor have been written, without a mask if boxes suffice.

Weight loaders write whole tensors or rectangular slices (one shard of a fused layer, one expert). Each write
is kept as a box in the tensor's own index space; disjoint boxes add up, so completeness is a sum. Writes that
do not fit that picture fall back to a boolean mask.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
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
    overlaps: bool = False  # some element was written by two different views
    covered: int = 0  # number of elements written at least once
    total: int = field(init=False)  # number of elements
    # (dimension, size, stride), the largest stride first
    _order: list[tuple[int, int, int]] = field(init=False)
    # shape and stride of a view -> its extents
    _extents: dict[tuple, list[int] | None] = field(default_factory=dict)
    _dense: bool = field(init=False)  # whether the elements are all those between the first and the last
    _rows: dict[tuple[int, int], list[Box]] = field(default_factory=dict)  # first edge of boxes -> the boxes
    _edges: list[tuple[int, int]] = field(default_factory=list)  # the first edges, sorted
    _longest: int = 0  # of the first edges

    def __post_init__(self) -> None:
        self.total = _volume([(0, size) for size in self.shape])
        dims = zip(range(len(self.shape)), self.shape, self.stride)
        self._order = sorted(dims, key=lambda dim: -dim[2])
        self._dense = _last(self.shape, self.stride, 0) + 1 == self.total

    @property
    def touched(self) -> bool:
        """Whether any write has been recorded."""
        return bool(self.boxes) or self.mask is not None

    def add(self, view: torch.Tensor, name: str = "") -> None:
        """Record a write to ``view``, which shares the tensor's storage."""
        if view.numel() == 0:  # a loader's "zero the padding" where there is none
            return
        box = self._box(view)
        if box is None:
            self._paint(view)
            return
        times = self.boxes.get(box, 0)
        if self.mask is not None or (not times and self._overlaps_any(box)):
            self._paint(view)
        if not times:
            self._place(box)
            self.names[box] = name
        self.boxes[box] = times + 1

    def satisfies(self, expected: Coverage) -> bool:
        """Whether everything written in ``expected`` has been written here as often."""
        if self.covered < expected.covered:
            return False
        # Where writes lie over one another (cleared first, scaled at the end), each of them is needed.
        needed = {box: n for box, n in expected.boxes.items() if n > 1 or expected.overlaps}
        if any(self.boxes.get(box, 0) < times for box, times in needed.items()):
            return False
        if self.covered == self.total or (
            expected.mask is None and expected.boxes.keys() <= self.boxes.keys()
        ):
            return True
        return not bool((expected.elements() & ~self.elements()).any())

    def missing(self, expected: Coverage | None) -> list[str]:
        """Return checkpoint names of the expected boxes not written yet; empty when names are unknown."""
        if expected is None:
            return []
        names = (expected.names[box] for box in expected.boxes if box not in self.boxes)
        return list(dict.fromkeys(name for name in names if name))

    def _place(self, box: Box) -> None:
        """Count a new box, and file it under its edge in the first dimension: there an expert is found at once."""
        if self.mask is None:
            self.covered += _volume(box)
        edge = box[0] if box else (0, 1)
        if edge not in self._rows:
            self._rows[edge] = []
            insort(self._edges, edge)
            self._longest = max(self._longest, edge[1] - edge[0])
        self._rows[edge].append(box)

    def _overlaps_any(self, box: Box) -> bool:
        start, end = box[0] if box else (0, 1)
        first = bisect_left(self._edges, (start - self._longest + 1, 0))
        for edge in self._edges[first : bisect_left(self._edges, (end, 0))]:
            for other in self._rows[edge]:
                if _overlap(box, other):
                    return True
        return False

    def _box(self, view: torch.Tensor) -> Box | None:
        """The rectangle ``view`` occupies in the tensor's index space, or None if it is no rectangle."""
        rest = view.storage_offset() - self.offset
        if rest < 0 or 0 in view.shape:
            return None
        if rest == 0 and view.numel() == self.total and view.is_contiguous() and self._dense:
            return tuple((0, size) for size in self.shape)
        form = view.shape, view.stride()
        extents = self._extents.get(form, ())
        if extents == ():  # the same for all experts of a layer
            extents = self._extents[form] = self._lay_out(*form)
        if extents is None:
            return None
        box: list[tuple[int, int]] = [(0, 1)] * len(self.shape)
        for dim, size, step in self._order:
            start, extent = 0, extents[dim]
            if size > 1:
                start, rest = divmod(rest, step) if step else (0, rest)
            if start + extent > size:
                return None
            box[dim] = (start, start + extent)
        return None if rest else tuple(box)

    def _lay_out(self, shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
        """How far a view extends along each dimension of the tensor; None if it is no rectangle in it."""
        long = [(step, size) for size, step in zip(shape, stride) if size > 1]
        sizes = dict(long)
        if len(sizes) != len(long):
            return None
        extents = [1] * len(self.shape)
        for dim, size, step in self._order:
            if size > 1:
                extents[dim] = sizes.pop(step, 1)
        return None if sizes else extents

    def elements(self) -> torch.Tensor:
        """Return which elements have been written: bool, in the tensor's shape, on the host."""
        if self.mask is not None:
            return self.mask
        mask = torch.zeros(self.shape, dtype=torch.bool, device="cpu")
        for box in self.boxes:
            mask[tuple(slice(*edge) for edge in box)] = True
        return mask

    def _paint(self, view: torch.Tensor) -> None:
        self.mask = self.elements()
        if 0 in view.shape or self.total == 0:
            return
        first = min(self.offset, view.storage_offset())
        ends = (
            _last(self.shape, self.stride, self.offset),
            _last(view.shape, view.stride(), view.storage_offset()),
        )
        marks = torch.zeros(max(ends) + 1 - first, dtype=torch.bool, device="cpu")
        marks.as_strided(view.shape, view.stride(), view.storage_offset() - first).fill_(True)
        painted = marks.as_strided(self.shape, self.stride, self.offset - first)
        self.overlaps |= bool((painted & self.mask).any())
        self.mask |= painted
        self.covered = int(torch.count_nonzero(self.mask))


def _last(shape, stride, offset: int) -> int:
    return offset + sum((size - 1) * step for size, step in zip(shape, stride))


def _volume(box) -> int:
    volume = 1
    for first, end in box:
        volume *= end - first
    return volume


def _overlap(a: Box, b: Box) -> bool:
    for (a0, a1), (b0, b1) in zip(a, b):
        if a0 >= b1 or b0 >= a1:
            return False
    return True
