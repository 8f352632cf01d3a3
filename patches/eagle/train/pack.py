"""Pack windows of samples into rows for training; windows of a row do not attend to each other.

Position j of a sample pairs the state of token j with token j + 1; its target is the state of token j + 1. So
a window of n positions spans n + 1 tokens, and no position has a target in another window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashpatch.patches.eagle.capture.sample import Sample


@dataclass(frozen=True)
class Pack:
    """Hold a row of T positions.

    Attributes:
        next_ids: int64 [T], the token after each position's.
        states: [T, width], what the drafter reads.
        targets: [T, H], the target's state one position on.
        positions: int64 [T], in the request.
        segment: int64 [T], the window each position belongs to.
        seen: bool [T], False where the state was not captured: no position attends to it.
        learn: bool [T], True for positions to learn from."""

    next_ids: Tensor
    states: Tensor
    targets: Tensor
    positions: Tensor
    segment: Tensor
    seen: Tensor
    learn: Tensor

    def __len__(self) -> int:
        return self.next_ids.shape[0]

    def mask(self) -> Tensor:
        """Return bool [1, 1, T, T]: a position attends to its window's captured past and to itself."""
        index = torch.arange(len(self), device=self.segment.device)
        past = index[:, None] >= index[None, :]
        same = self.segment[:, None] == self.segment[None, :]
        own = index[:, None] == index[None, :]
        return (past & same & (self.seen[None, :] | own))[None, None]

    def learn_at(self, step: int) -> Tensor:
        """Return bool [T]: rows from which a drafting's step ``step``, counted from 0, has a target in the window.

        That target is `targets` of the row ``step`` rows on."""
        if step == 0:
            return self.learn
        found = torch.zeros_like(self.learn)
        if step < len(self):
            same = self.segment[step:] == self.segment[:-step]
            found[:-step] = self.learn[step:] & self.seen[:-step] & same
        return found

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Pack:
        """Return the row on a device, with states and targets in ``dtype``."""
        return Pack(
            self.next_ids.to(device),
            self.states.to(device, dtype),
            self.targets.to(device, dtype),
            *(tensor.to(device) for tensor in (self.positions, self.segment, self.seen, self.learn)),
        )


def windows(sample: Sample, longest: int, auxiliary: bool = False) -> Iterator[Pack]:
    """Cut a sample into windows of at most ``longest`` positions; those without a generated token to learn from are
    left out. ``auxiliary``: with the EAGLE-3 layers instead of the last state."""
    states = sample.auxiliary if auxiliary else sample.hidden
    learn = sample.known[:-1] & sample.known[1:] & sample.response[1:]
    for start in range(0, len(sample) - 1, longest):
        stop = min(start + longest, len(sample) - 1)
        if learn[start:stop].any():
            yield Pack(
                sample.input_ids[start + 1 : stop + 1],
                states[start:stop],
                sample.hidden[start + 1 : stop + 1],
                torch.arange(start, stop),
                torch.zeros(stop - start, dtype=torch.int64),
                sample.known[start:stop],
                learn[start:stop],
            )


def join(parts: Sequence[Pack]) -> Pack:
    """Join several rows into one; each part's segments become its own."""
    segments, first = [], 0
    for part in parts:
        segments.append(part.segment + first)
        first += int(part.segment.max()) + 1
    names = ("next_ids", "states", "targets", "positions", "seen", "learn")
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return Pack(segment=torch.cat(segments), **joined)


def pack(parts: Iterable[Pack], budget: int) -> list[Pack]:
    """Pack rows of at most ``budget`` positions, filled best fit with the longest first; a longer part is a
    row of its own."""
    rows: list[tuple[int, list[Pack]]] = []
    for part in sorted(parts, key=len, reverse=True):
        room = [(budget - used - len(part), place) for place, (used, _) in enumerate(rows)]
        fit = min((pair for pair in room if pair[0] >= 0), default=None)
        if fit is None:
            rows.append((len(part), [part]))
        else:
            used, inside = rows[fit[1]]
            inside.append(part)
            rows[fit[1]] = used + len(part), inside
    return [join(inside) for _, inside in rows]
