"""What travels beside the weights: fingerprints of tensors in two messages, how they are computed and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashpatch.patches._shared import tensor_message
from flashpatch.patches._shared.context import timed

OPEN = "__flashpatch_audit_open__"
"""Start of the names of the message before the weights."""
CLOSE = "__flashpatch_audit_close__"
"""Start of the names of the message after them."""

opening, closing = partial(tensor_message.encode, OPEN), partial(tensor_message.encode, CLOSE)
"""Encode a message: ``opening(content, device)``, as names and tensors."""

Sums = tuple[int, int]
_SHOWN = 6
_SMALL = 1 << 20  # bytes


def ours(name: str) -> bool:
    """Whether a tensor is part of a message."""
    return name.startswith((OPEN, CLOSE))


@dataclass(frozen=True)
class Seen:
    """Hold a tensor's shape, dtype and fingerprint."""

    shape: tuple[int, ...]
    dtype: str
    sums: Sums

    def as_json(self) -> list[Any]:
        return [list(self.shape), self.dtype, *self.sums]

    @classmethod
    def of_json(cls, value: Sequence[Any]) -> Seen:
        shape, dtype, first, second = value
        return cls(tuple(shape), dtype, (first, second))


def differences(
    sent: Mapping[str, Seen],
    arrived: Mapping[str, Seen],
    twice: Iterable[str] = (),
    excused: Iterable[str] = (),
    before: Mapping[str, Seen] | None = None,
) -> list[str]:
    """Return a sentence for each tensor that differs from the trainer's shards.

    Args:
        sent: from the shards.
        arrived: from what the rollout engine received.
        twice: names that arrived more than once.
        excused: names that the trainer sends without a fingerprint.
        before: what was sent at the previous sync, to recognise a value that was not renewed."""
    found = [f"{name} arrived twice" for name in twice]
    first: dict[Sums, str] = {}  # fingerprint -> the first tensor that was sent with it
    for name, its in sent.items():
        first.setdefault(its.sums, name)
    for name, wanted in sent.items():
        got = arrived.get(name)
        if got is None:
            found.append(f"{name} is missing")
        elif got.shape != wanted.shape:
            found.append(f"{name} has shape {list(got.shape)}, the trainer's has {list(wanted.shape)}")
        elif got.dtype != wanted.dtype:
            found.append(f"{name} has dtype {got.dtype}, the trainer sent {wanted.dtype}")
        elif got.sums != wanted.sums:
            found.append(f"{name} {_guess(name, got, first.get(got.sums), before or {})}")
    excused = set(excused)
    found += [
        f"{name} is extra: the trainer sent none of that name"
        for name in arrived
        if name not in sent and name not in excused
    ]
    return found


def _guess(name: str, got: Seen, twin: str | None, before: Mapping[str, Seen]) -> str:
    if name in before and got.sums == before[name].sums:
        return "is stale: it has the values of the sync before"
    return "has other values than the trainer's shards" if twin is None else f"has the values of {twin}"


def shortened(sentences: Sequence[str]) -> str:
    """Join all of them, or the first few and the number of the others."""
    more = len(sentences) - _SHOWN
    return "; ".join(sentences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


class Background:
    """Run work on a second thread that starts when it is first needed.

    Attributes:
        seconds: spent on all work so far, on either thread."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self.seconds = 0.0

    def submit(self, tensor: Any, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``function(*args)``, which reads as much as ``tensor``; on the caller's stream, which alone waits for a sender."""
        if tensor.nbytes >= _SMALL:
            from flashpatch.patches._shared import streams

            def read() -> Any:
                with streams.on(stream, tensor.device):
                    return self._timed(function, *args)

            stream = streams.current(tensor.device)
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="flashpatch-audit")
            return self._pool.submit(read)
        done: Future[Any] = Future()
        done.set_result(self._timed(function, *args))
        return done

    def close(self) -> None:
        """Wait for the work that has begun and drop the rest."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _timed(self, function: Callable[..., Any], *args: Any) -> Any:
        with timed(self, "seconds"):
            return function(*args)
