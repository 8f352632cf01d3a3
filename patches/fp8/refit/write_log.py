"""Note how writes into given tensors are undone."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashpatch.patches.fp8.refit.fold import Undo
from flashpatch.patches.fp8.refit.write_tracker import storage_identity, tensors_in, written_arguments


class WriteLog(TorchDispatchMode):
    """Within, copy what an operator is about to overwrite.

    Args:
        tensors: whose memory is watched.
        undo: receives the steps back, to be run in reverse order; None: nothing is noted.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], undo: list[Undo] | None) -> None:
        super().__init__()
        self._undo = undo
        self._watched = {storage_identity(tensor) for tensor in tensors} if undo is not None else set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        written = written_arguments(func) if self._undo is not None else ()
        for key, arg in (*enumerate(args), *(kwargs or {}).items()) if written else ():
            for tensor in tensors_in(arg) if key in written else ():
                if storage_identity(tensor) in self._watched:
                    self._undo.append(functools.partial(tensor.copy_, tensor.clone()))
        return func(*args, **(kwargs or {}))
