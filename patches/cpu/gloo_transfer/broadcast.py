"""Broadcast buffers over a gloo group of this transfer's own, beside the processes' default groups."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashpatch.patches.cpu.gloo_transfer.control import Watch
from flashpatch.patches.cpu.gloo_transfer.errors import transfer_error

_POLLS = (0.0005, 0.02)  # seconds between two looks at an operation: at first, and at most

_abandoned: list[tuple[Any, Any]] = []
"""Groups with an operation under way: gloo cannot end it before its time-out, and destroying them would wait."""


class GlooGroup:
    """Join the group of one transfer.

    Args:
        store: the transfer's own; name: prefix of its keys.
        rank, size: of the group; rank 0 sends.
        address: of this machine, as the other ranks reach it. ``GLOO_SOCKET_IFNAME`` wins.
        timeout: seconds.

    Raises:
        PatchError: not all ranks came.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, address: str, timeout: float
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        where = {"interface": interface} if interface else {"hostname": address}
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(**where)]
            self._group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)
        except RuntimeError as error:
            raise transfer_error(
                f"rank {rank} of {size} cannot join the gloo group at {where}: {error}."
            ) from error
        self._rank, self._timeout, self._work = rank, timeout, None

    def start(self, data: torch.Tensor) -> None:
        """Start to broadcast rank 0's ``(length,)`` uint8 into that of the others."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._work = self._group.broadcast([data], options)

    def finish(self, watch: Watch, late: Callable[[], Exception]) -> None:
        """Wait for the operation under way, if there is one.

        Args:
            watch: called with seconds to wait; raises when a peer failed or ended.
            late: makes the error for peers that do not take part in time.

        Raises:
            PatchError: the operation failed or took too long.
        """
        pause, deadline = _POLLS[0], time.monotonic() + self._timeout
        while self._work is not None and not self._work.is_completed():
            watch(pause)
            pause = min(2 * pause, _POLLS[1])
            if time.monotonic() > deadline:
                raise late()
        work, self._work = self._work, None
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            watch(1.0)  # a peer that ended is the reason, and says more
            raise transfer_error(f"a broadcast failed at rank {self._rank}: {error}.") from error

    def close(self) -> None:
        """Leave the group without waiting."""
        _abandoned[:] = [(group, work) for group, work in _abandoned if not work.is_completed()]
        if self._work is not None and not self._work.is_completed():
            _abandoned.append((self._group, self._work))
        self._group = self._work = None
