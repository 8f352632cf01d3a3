"""Turn what a model's forward without gradient computes of whole answers into samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flashpatch.patches.eagle.capture.capture_window import DRAWS
from flashpatch.patches.eagle.capture.sample import Sample
from flashpatch.patches.eagle.capture.sample_queue import SampleWriter

_LAST = -1  # beside the numbers of layers


class PassSamples:
    """Note a model's last states, and those that EAGLE-3 reads, during `noting`, and queue them by `take`.

    Args:
        model: of transformers, with ``get_decoder``, wrapped by FSDP or not.
        kind: ``eagle`` or ``eagle3``, which also reads what enters the layers 2, n/2 and n-3, as engines hand out.
        writer: of the sample queue.
        budget, window: as in `flashpatch.patches.eagle.capture.recorder.Recorder`.

    Attributes:
        version: of the policy whose states are queued, counted from 0.
        trained: set by who trains the model: the next pass is of another version.
        counts: ``requests`` and ``rows`` that were queued."""

    def __init__(self, model: Any, kind: str, writer: SampleWriter, budget: int, window: int) -> None:
        self.writer, self.budget, self.window = writer, budget, window
        self.version, self.trained, self._spent = 0, False, 0
        self.counts: Counter[str] = Counter(requests=0, rows=0)
        self._notes: dict[int, torch.Tensor] | None = None
        decoder = model.get_decoder()
        count = len(decoder.layers)
        self._layers = (2, count // 2, count - 3) if kind == "eagle3" else ()
        for number in self._layers:
            decoder.layers[number].register_forward_pre_hook(self._note_input(number), with_kwargs=True)
        decoder.register_forward_hook(self._note_output)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the states of the forward inside."""
        self._notes = {}
        try:
            yield
        finally:
            self._notes = None

    def take(self, ids: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> None:
        """Queue samples of the forward inside `noting`.

        Args:
            ids: int64 [n] per sequence, in the forward's order: one row with all of them side by side, or a row each.
            trained: [n], not 0 for the tokens that the policy generated.

        Raises KeyError if the decoder, or a layer that EAGLE-3 reads, was not called."""
        last, *inner = (self._notes[number] for number in (_LAST, *self._layers))
        if self.trained:
            self.version, self.trained, self._spent = self.version + 1, False, 0
        packed, start = last.shape[0] == 1, 0
        for row, (tokens, learn) in enumerate(zip(ids, trained, strict=True)):
            begin = start if packed else row * last.shape[1]
            start += len(tokens)
            starts = [n * self.window for n, part in enumerate(learn.split(self.window)) if part[1:].any()]
            if not starts or 0 < self.budget <= self._spent:
                continue
            first = DRAWS.choice(starts)
            own = slice(first, min(first + self.window, len(tokens)))
            rows = slice(begin + own.start, begin + own.stop)
            hidden, *aux = (states.flatten(0, 1)[rows].to("cpu", copy=True) for states in (last, *inner))
            sample = Sample(
                f"{self.version}-{row}",
                tokens[own].to("cpu", torch.int64),
                hidden,
                torch.ones(len(hidden), dtype=torch.bool),
                learn[own].to("cpu", torch.bool),
                self.version,
                torch.cat(aux, dim=-1) if aux else None,
            )
            self._spent += len(sample)
            self.counts.update(requests=1, rows=len(sample))
            self.writer.offer(sample)

    def _note_input(self, number: int) -> Any:
        def note(layer: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
            if self._notes is not None:
                self._notes[number] = arguments[0] if arguments else keywords["hidden_states"]

        return note

    def _note_output(self, decoder: nn.Module, arguments: tuple, output: Any) -> None:
        if self._notes is not None:
            self._notes[_LAST] = output[0]
