"""Write the receipts of an update session: what each rank of this SGLang server committed, and what it took."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from flashpatch import engine
from flashpatch.ledger import files
from flashpatch.patches._shared.context import timed
from flashpatch.patches.fp8 import model_registry

if TYPE_CHECKING:
    from flashpatch.patches.fp8.update.model import ManagedModel

MARK = " flashpatch receipts: "
"""Separates SGLang's own message from the receipts, a JSON list."""


class SessionReceipt:
    """Follow one session in one scheduler process.

    Args:
        sync: the sender's id of it; empty if it gave none and wants no receipts.
        owners: the models it updates.
        retry: the session before was not committed, so that its version number is missing."""

    def __init__(self, sync: str, owners: Sequence[ManagedModel], retry: bool) -> None:
        self.sync = sync
        self._retry = retry
        self._owners = list(owners)
        self._before = [owner.version for owner in owners]
        self._load = self._process = 0.0
        self._tensors = 0

    def loading(self, weights: Sequence[tuple[str, Any]] | Mapping[str, Any]) -> AbstractContextManager[None]:
        """Time the loading of one bucket, and count it: names and tensors, or a flattened bucket, ``flattened_tensor``
        with its ``metadata``."""
        self._tensors += len(weights["metadata"] if isinstance(weights, Mapping) else weights)
        return timed(self, "_load")

    def processing(self) -> AbstractContextManager[None]:
        """Time the work before the first bucket or after the last."""
        return timed(self, "_process")

    def of_this_rank(self, rank: int, world: int, quantization: str | None) -> dict[str, Any]:
        """Return this rank's receipt, with the entries that a vLLM worker's has under verl."""
        owners = self._owners
        checksums = engine.options("fp8")["verify_commit"]
        return {
            "id": self.sync,
            "step": None,
            "rank": rank,
            "world": world,
            "host": files.host(),
            "pid": os.getpid(),
            "before": self._before,
            "after": [owner.version for owner in owners],
            "states": [owner.state for owner in owners],
            "adapter": False,
            "retry": self._retry,
            "receive": self._load,
            "load": self._load,
            "process": self._process,
            "tensors": self._tensors,
            "checksums": [f"{quantization} {owner.checksum()}" for owner in owners] if checksums else [],
            "wide": model_registry.wide_names(model.wide for model in owners),
        }


def of_adapter(runner: Any, sync: str, adapters: Mapping[str, str], seconds: float) -> str:
    """Return the receipts of all ranks for a LoRA adapter that is in place, as `of_all_ranks` does.

    Args:
        runner: SGLang's ``ModelRunner`` of this rank.
        sync: the sender's id of the sync.
        adapters: digest by name of those that this rank holds.
        seconds: that it took."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    from flashpatch.patches.fp8 import model_registry

    group, owner = get_tp_group(), model_registry.get(runner.model)
    receipt = SessionReceipt(sync, [] if owner is None else [owner], False).of_this_rank(
        group.rank_in_group, group.world_size, runner.model_config.quantization
    )
    receipt |= {"adapter": True, "adapters": dict(adapters), "load": seconds, "receive": seconds}
    return of_all_ranks(receipt, group.cpu_group)


class _Session:
    """Hold the receipt of the open session of this process.

    Attributes:
        receipt: None while no session is open.
        failed: the session before was not committed."""

    receipt: SessionReceipt | None = None
    failed = False


def begin(sync: str, owners: Sequence[ManagedModel]) -> SessionReceipt:
    """Follow a session that begins; one that was not ended has failed."""
    _Session.failed |= _Session.receipt is not None
    _Session.receipt = SessionReceipt(sync, owners, _Session.failed)
    return _Session.receipt


def current() -> SessionReceipt | None:
    """Return the receipt of the open session, or None."""
    return _Session.receipt


def unfinished() -> bool:
    """Whether a session is open whose sender numbers its updates."""
    return _Session.receipt is not None and bool(_Session.receipt.sync)


def end(done: bool) -> None:
    """Note the end of the session, and whether it was committed."""
    _Session.receipt, _Session.failed = None, not done


def of_all_ranks(receipt: dict[str, Any] | None, group: Any) -> str:
    """Gather the receipts of a tensor-parallel group and return them as text for SGLang's message.

    Every rank of ``group``, a gloo process group, must call this."""
    import torch

    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, receipt, group=group)
    return MARK + json.dumps(found) if all(found) else ""
