"""The sending end: keep what was sent last, and yield what has changed since."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flashpatch.patches.fp8.delta import wire

if TYPE_CHECKING:
    import torch

    Named = tuple[str, torch.Tensor]


@dataclass
class Sent:
    """Count one sync.

    Attributes:
        base, version: versions that it leads from, None if everything was sent, and to.
        bytes: what was handed to the transfer; whole: what a sync of everything would have handed to it.
        changed, values: values that differ from those sent before, if that was looked for, and all of them.
        seconds: in comparing, encoding and fingerprints."""

    base: str | None
    version: str
    bytes: int = 0
    whole: int = 0
    changed: int = 0
    values: int = 0
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Return plain values for the ledger."""
        share = self.bytes / self.whole if self.whole else 1.0
        return {**asdict(self), "seconds": round(self.seconds, 6), "share": round(share, 6)}


class Sender:
    """Hold a copy of all weights in host memory, as they were sent last.

    Attributes:
        version: of the copy; None while it may differ from what receivers got.
        last: the numbers of the last sync; None before the first."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._next: str | None = None  # the version of a stream that was taken to its end
        self.version: str | None = None
        self.last: Sent | None = None

    def stream(self, weights: Iterable[Named], version: str, base: str | None) -> Iterator[Named]:
        """Yield what brings receivers to the weights; `sent` must follow once they have arrived.

        Args:
            weights: names and tensors of any shape, dtype, strides and device.
            version: name of the new version.
            base: version that all receivers hold; None, or another one than this end sent last: send everything.

        Raises:
            ValueError: two weights have one name."""
        import torch

        from flashpatch.patches._shared import tensor_message

        base = base if base == self.version else None
        self.version = self._next = None
        sent = self.last = Sent(base, version)
        table: dict[str, Any] = {}
        items = iter(weights)
        first = next(items, None)
        device = torch.device("cpu") if first is None else first[1].device
        opening = {"base": base, "version": version}
        yield from _counted(sent, tensor_message.encode(wire.OPEN, opening, device))
        while first is not None:
            name, tensor = first
            if name in table:
                raise ValueError(f"{name} comes twice in one sync, so its version would not be known")
            if wire.is_message(name):
                table[name] = None
                sent.whole += tensor.nbytes
                yield from _counted(sent, [first])
            else:
                began = time.perf_counter()
                table[name], found = self._weight(name, tensor, sent)
                sent.seconds += time.perf_counter() - began
                yield from _counted(sent, found)
            first = next(items, None)
        closing = {"version": version, "weights": list(table.items())}
        yield from _counted(sent, tensor_message.encode(wire.CLOSE, closing, device))
        self._copies = {name: copy for name, copy in self._copies.items() if name in table}
        self._next = version

    def sent(self) -> None:
        """Take the last stream as arrived, if it was taken to its end."""
        self.version = self._next

    def _weight(self, name: str, tensor: torch.Tensor, sent: Sent) -> tuple[Any, list[Named]]:
        """Return the weight's fingerprint, and what to send for it: nothing, a patch, or the tensor."""
        from flashpatch.patches._shared import fingerprint
        from flashpatch.patches.fp8.delta import changes

        tensor = tensor.detach().contiguous()
        sent.whole += tensor.nbytes
        sent.values += tensor.numel()
        digest = fingerprint.of(tensor)
        copy = self._copies.get(name)
        if copy is None or copy.shape != tensor.shape or (sent.base is None and copy.dtype != tensor.dtype):
            self._copies[name] = tensor.to("cpu", copy=True)
            return digest, [(name, tensor)]
        if sent.base is None:
            copy.copy_(tensor)
            return digest, [(name, tensor)]
        # The receiver casts its copy too, so only what differs then has to travel.
        cast = copy.dtype != tensor.dtype
        copy = self._copies[name] = copy.to(tensor.dtype)
        new = changes.bits(tensor)
        changed, encoded = changes.encode(changes.bits(copy), new, some=cast)  # a patch says that it is cast
        sent.changed += changed
        if not (changed or cast):
            return digest, []
        if encoded is None:
            copy.copy_(tensor)
            return digest, [(name, tensor)]
        width, count, data = encoded
        changes.apply(changes.bits(copy), width, count, data)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return digest, [(wire.Patched(name, width, count, dtype).name(), data)]


def _counted(sent: Sent, items: Iterable[Named]) -> Iterator[Named]:
    for item in items:
        sent.bytes += item[1].nbytes
        yield item
