"""Note what is written into given tensors, so that it can be undone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashpatch.patches.fp8.refit.write_tracker import storage_identity, tensors_in, written_arguments


class WriteLog(TorchDispatchMode):
    """Within, copy what an operator is about to overwrite.

    Args:
        tensors: whose memory is watched.

    Attributes:
        writes: each tensor that was written to, a view perhaps, and a copy of what it held before, in order.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's wrapper around `__torch_dispatch__`: code is not compiled while such a mode is active."""
        return False

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.writes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._watched = {storage_identity(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        written = written_arguments(func)
        for key, arg in (*enumerate(args), *(kwargs or {}).items()) if written else ():
            for tensor in tensors_in(arg) if key in written else ():
                if storage_identity(tensor) in self._watched:
                    self.writes.append((tensor, tensor.clone()))
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        """Write everything back."""
        for tensor, before in reversed(self.writes):
            tensor.copy_(before)
