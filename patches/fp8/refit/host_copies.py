"""Keep tensors on the host while an engine gives their memory away."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HostCopies:
    """Copy the memory of tensors to the host, once per storage, and back into the same memory.

    Args:
        tensors: on any device.
        without: tensors whose memory is not copied, though some of ``tensors`` share it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> None:
        skipped = {tensor.untyped_storage()._cdata for tensor in without}
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for key, memory in found.items():
            if key not in skipped and memory.nbytes():
                copy = torch.UntypedStorage(memory.nbytes(), device="cpu")
                self._copies.append((memory, copy.copy_(memory)))

    def restore(self) -> None:
        """Copy everything back; the tensors' memory must be there again."""
        for memory, copy in self._copies:
            memory.copy_(copy)
