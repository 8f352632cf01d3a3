"""Send fingerprints of the trainer's shards behind the weights: the trainer's side of the audit."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.fsdp")

ID = "fsdp.verl.get_per_tensor_param"
IMPL = "verl.workers.engine.fsdp.transformer_impl"
_ADVICE = "The option audit of fsdp: report sends them without, off sends all without."

_syncs: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""Each engine's unique name, and the number of exports of its weights."""


def on_export(
    original, self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
) -> Any:
    """Add fingerprints to the tensors that ``FSDPEngine.get_per_tensor_param`` returns.

    Raises:
        PatchError: the tensors cannot be traced back to shards: a merged adapter, or verl's own quantization.
    """
    options = engine.options("fsdp")
    ledger.role("trainer")
    tensors, adapter = original(self, layered_summon, base_sync_done, **kwargs)
    if options["audit"] == "off":
        return tensors, adapter
    problem = unanswerable(self, adapter)
    if problem and options["audit"] == "refuse":
        raise PatchError(f"{problem} cannot be traced back to shards.", patch=ID, advice=_ADVICE)
    every = max(1, options["audit_every"])
    account = partial(_Account, self, options["audit"], adapter is not None, base_sync_done)
    return _followed(self, tensors, account, every, problem), adapter


def unanswerable(trainer: Any, adapter: Any) -> str:
    """Say what is exported instead of the shards' values; empty when the shards are."""
    whole = getattr(trainer.module, "_fsdp_wrapped_module", trainer.module)
    if adapter is None and hasattr(whole, "peft_config"):
        return "weights with a merged LoRA adapter"
    if getattr(trainer, "_qat_enabled", False):
        return "weights of quantization-aware training"
    return ""


def _followed(
    trainer: Any, tensors: Iterable[Any], account_of: Callable[[], _Account], every: int, problem: str
) -> Iterator[Any]:
    """Yield the same tensors between the two messages, on all ranks, as the weights are sent."""
    from flashpatch.patches.fsdp import messages

    source = _syncs.setdefault(trainer, [os.urandom(8).hex(), 0])
    source[1] += 1
    number = source[1]
    audited = not problem and (number - 1) % every == 0
    rest = iter(tensors)
    first = next(rest, None)
    device = first[1].device if first is not None else "cpu"
    opening = {"source": source[0], "sync": number, "audited": audited}
    yield from messages.opening(opening, device)
    if not audited:
        if problem:
            logger.warning("sync %d is not audited: %s cannot be traced back to shards", number, problem)
        ledger.note(audit={"sync": number, "audited": False, "not_audited": problem})
        if first is not None:
            yield first
            yield from rest
        return
    with account_of() as account:
        while first is not None:
            account.sends(*first)
            yield first
            first = next(rest, None)
        table = account.closed()
    ledger.note(audit={"sync": number, "tensors": len(table["sent"]), **account.facts})
    yield from messages.closing({"sync": number, **table}, device)


class _Account:
    """Fingerprints from this rank's shards, large ones computed on a second thread while the weights are on
    their way.

    Of the exported tensors only name, shape and dtype are looked at: how the trainer casts its values.
    """

    def __init__(self, trainer: Any, mode: str, adapter: bool, base_sync_done: bool) -> None:
        from flashpatch.patches.fsdp import param_names, shards
        from flashpatch.patches.fsdp.background import Background

        self._mode = mode
        self._mesh = trainer.device_mesh
        self._place = shards.place(self._mesh)
        entries = shards.own(trainer.module, self._place)
        self._entries = param_names.exported(entries, trainer.module, adapter, base_sync_done)
        self._parts = param_names.parts(self._entries)
        self._sent: dict[str, tuple[Any, str, Future[Any]]] = {}
        self._twice: list[str] = []
        self._unknown: list[str] = []
        self._misshapen: list[str] = []
        self._background = Background()
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> _Account:
        return self

    def __exit__(self, *_: object) -> None:
        self._background.close()

    def sends(self, name: str, tensor: Any) -> None:
        part = self._parts.get(name)
        if part is None:
            self._unknown.append(name)
        elif name in self._sent:
            self._twice.append(name)
        else:
            if tuple(tensor.shape) != part.shape:
                self._misshapen.append(f"{name} is exported as {list(tensor.shape)}, not {list(part.shape)}")
            mine = self._entries[part.of]
            future = self._background.submit(tensor.nbytes, mine.sums, part.begin, part.end, tensor.dtype)
            self._sent[name] = part, str(tensor.dtype), future

    def closed(self) -> dict[str, Any]:
        """Return the table of fingerprints for the rollout engine, equal on all ranks.

        Raises:
            PatchError: replicas of the model differ, or the export does not match the shards.
        """
        from flashpatch.patches.fsdp.compare import Seen

        began = time.monotonic()
        parts = [future.result() for _, _, future in self._sent.values()]
        waited = time.monotonic() - began
        copies = _summed(parts, self._place, self._mesh)
        mine = copies[self._place.replica]
        self.facts = {"seconds": round(self._background.seconds, 4), "waited": round(waited, 4)}
        self._object(copies)
        sent = {
            name: Seen(part.shape, dtype, sums).as_json()
            for (name, (part, dtype, _)), sums in zip(self._sent.items(), mine, strict=True)
        }
        return {"sent": sent, "not_audited": self._unknown}

    def _object(self, copies: list[list[Any]]) -> None:
        from flashpatch.patches.fsdp.compare import shortened

        covered = self._sent.keys() | {part.of for part, _, _ in self._sent.values()}
        found = [f"{name} is exported twice" for name in self._twice]
        found += [f"{name} is not exported" for name in self._entries if name not in covered]
        found += self._misshapen
        for at, name in enumerate(self._sent):
            different = [i for i, copy in enumerate(copies) if copy[at] != copies[0][at]]
            if different:
                found.append(f"{name} differs between replica 0 and {', '.join(map(str, different))}")
        if self._unknown:
            text = f"cannot be traced back to shards: {shortened(self._unknown)}"
            logger.warning("not audited, since they %s", text)
            if self._mode == "refuse":
                raise PatchError(f"some exported tensors {text}.", patch=ID, advice=_ADVICE)
        if found:
            _complain(f"the trainer's own ranks do not agree on the weights: {shortened(found)}.", self._mode)
            self.facts["problem"] = shortened(found)


def _complain(problem: str, mode: str) -> None:
    if mode == "refuse":
        raise PatchError(
            problem, patch=ID, advice="Nothing was committed. To continue anyway, set audit=report."
        )
    logger.error("%s", problem)


def _summed(parts: list[Any], place: Any, mesh: Any) -> list[list[Any]]:
    """Fingerprints by replica and tensor: each rank adds its parts to its replica's row, in one all-reduce.

    Halves of 32 bits travel as 64-bit integers, so that no sum over fewer than 2**31 ranks overflows.
    """
    import torch
    import torch.distributed as dist

    low = (1 << 32) - 1
    halves = [[a & low, a >> 32, b & low, b >> 32] for a, b in parts]
    rows = torch.zeros(place.replicas, len(parts), 4, dtype=torch.int64)
    rows[place.replica] = torch.tensor(halves, dtype=torch.int64).view(-1, 4)
    if mesh.size() > 1:
        rows = rows.to(mesh.device_type)
        dist.all_reduce(rows)
    mask = (1 << 64) - 1
    return [
        [((a + (b << 32)) & mask, (c + (d << 32)) & mask) for a, b, c, d in row]
        for row in rows.cpu().tolist()
    ]


PATCH = Patch(
    id=ID,
    targets=(f"{IMPL}:FSDPEngine.get_per_tensor_param",),
    requires="verl>=0.7",
    wrapper=on_export,
    contract=Contract(
        params=("layered_summon", "base_sync_done"),
        mentions=("self.module", "peft_config", "self._qat_enabled", "per_tensor_param"),
        exists=(f"{IMPL}:FSDPEngine._init_device_mesh", "verl.utils.model:convert_weight_keys"),
    ),
    evidence="update",
    when="anywhere=fsdp.verl.get_sharding_strategy anywhere=fsdp.verl.validate_config",
    scope=frozenset({"trainer"}),
    why="Between a trainer's shards and the rollout engine lie a gather, a buffer and another process; a "
    "flipped bit or a missing tensor there goes unnoticed.",
    how="Sends a fingerprint of each parameter behind the weights, computed on each rank's own shards after "
    "the cast to what is sent and added up over the ranks. Replicas of the model must agree.",
    remove_when="verl checks what arrives against the trainer's shards.",
)
