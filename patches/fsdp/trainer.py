"""Send fingerprints of the trainer's shards behind the weights, and keep the replicas of an FSDP1 model one model: what
changes in verl's FSDP engine."""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared import gathered
from flashpatch.patches.fsdp import fingerprints
from flashpatch.patches.fsdp.fingerprints import Background, Seen, shortened

logger = logging.getLogger("flashpatch.fsdp")

UTILS = "verl.workers.engine.fsdp.utils"
IMPL = "verl.workers.engine.fsdp.transformer_impl"
_ADVICE = "The option audit of fsdp: report sends them without, off sends all without."

_syncs: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""Each engine's unique name, and the number of exports of its weights."""

patches = Patches("fsdp", "verl>=0.7", scope="trainer")


@patches.wrap(
    f"{IMPL}:FSDPEngine.get_per_tensor_param",
    relies_on=(
        "self.module",
        "peft_config",
        "self._qat_enabled",
        "per_tensor_param",
        f"{IMPL}:FSDPEngine._init_device_mesh",
        "verl.utils.model:convert_weight_keys",
    ),
    evidence="update",
    when="anywhere=fsdp.verl.get_sharding_strategy anywhere=fsdp.verl.validate_config",
    why="Between a trainer's shards and the rollout engine lie a gather, a buffer and another process; a "
    "flipped bit or a missing tensor there goes unnoticed.",
    remove_when="verl checks what arrives against the trainer's shards.",
)
def get_per_tensor_param(
    original, self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
) -> Any:
    """Send a fingerprint of each parameter behind the weights, computed on each rank's own shards after the cast to what is
    sent and added up over the ranks. Replicas of the model must agree.

    Raises PatchError if the tensors cannot be traced back to shards: a merged adapter, or verl's own quantization."""
    options = engine.options("fsdp")
    ledger.role("trainer")
    tensors, adapter = original(self, layered_summon, base_sync_done, **kwargs)
    if options["audit"] == "off":
        return tensors, adapter
    problem = untraceable(self, adapter)
    if problem and options["audit"] == "refuse":
        raise PatchError(
            f"{problem} cannot be traced back to shards.",
            patch=patches.of(get_per_tensor_param).id,
            advice=_ADVICE,
        )
    every = max(1, options["audit_every"])
    account = partial(ShardFingerprints, self, options["audit"], adapter is not None, base_sync_done)
    return _with_messages(self, tensors, account, every, problem), adapter


def untraceable(trainer: Any, adapter: Any) -> str:
    """Say what is exported instead of the shards' values; empty when the shards are."""
    whole = getattr(trainer.module, "_fsdp_wrapped_module", trainer.module)
    if adapter is None and hasattr(whole, "peft_config"):
        return "weights with a merged LoRA adapter"
    return "weights of quantization-aware training" if getattr(trainer, "_qat_enabled", False) else ""


def _with_messages(
    trainer: Any,
    tensors: Iterable[Any],
    account_of: Callable[[], ShardFingerprints],
    every: int,
    problem: str,
) -> Iterator[Any]:
    """Yield the same tensors between the two messages, on all ranks, as the weights are sent."""
    source = _syncs.setdefault(trainer, [os.urandom(8).hex(), 0])
    source[1] += 1
    number = source[1]
    audited = not problem and (number - 1) % every == 0
    rest = iter(tensors)
    first = next(rest, None)
    device = first[1].device if first is not None else "cpu"
    yield from fingerprints.opening({"source": source[0], "sync": number, "audited": audited}, device)
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
            account.add(*first)
            yield first
            first = next(rest, None)
        table = account.table()
    ledger.note(audit={"sync": number, "tensors": len(table["sent"]), **account.facts})
    yield from fingerprints.closing({"sync": number, **table}, device)


class ShardFingerprints:
    """Compute fingerprints of this rank's shards, large ones on a second thread while the weights are on their way.

    Of the exported tensors only name, shape and dtype are looked at: how the trainer casts its values."""

    def __init__(self, trainer: Any, mode: str, adapter: bool, base_sync_done: bool) -> None:
        from flashpatch.patches.fsdp import shards

        self._mode = mode
        self._mesh = trainer.device_mesh
        self._place = shards.place(self._mesh)
        entries = shards.own(trainer.module, self._place)
        self._entries = shards.exported(entries, trainer.module, adapter, base_sync_done)
        self._parts = shards.parts(self._entries)
        self._sent: dict[str, tuple[Any, str, Future[Any]]] = {}
        self._twice: list[str] = []
        self._unknown: list[str] = []
        self._misshapen: list[str] = []
        self._background = Background()
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> ShardFingerprints:
        return self

    def __exit__(self, *_: object) -> None:
        self._background.close()

    def add(self, name: str, tensor: Any) -> None:
        """Note one exported tensor, and begin its fingerprint."""
        part = self._parts.get(name)
        if part is None:
            self._unknown.append(name)
        elif name in self._sent:
            self._twice.append(name)
        else:
            if tuple(tensor.shape) != part.shape:
                self._misshapen.append(f"{name} is exported as {list(tensor.shape)}, not {list(part.shape)}")
            mine = self._entries[part.of]
            where = part.begin, part.end, tensor.dtype, tensor.device
            future = self._background.submit(tensor, mine.sums, *where)
            self._sent[name] = part, str(tensor.dtype), future

    def table(self) -> dict[str, Any]:
        """Return the table of fingerprints for the rollout engine, equal on all ranks. Raises PatchError if replicas of
        the model differ, or the export does not match the shards."""
        began = time.monotonic()
        parts = [future.result() for _, _, future in self._sent.values()]
        waited = time.monotonic() - began
        copies = _by_replica(parts, self._place, self._mesh)
        mine = copies[self._place.replica]
        self.facts = {"seconds": round(self._background.seconds, 4), "waited": round(waited, 4)}
        self._check(copies)
        sent = {
            name: Seen(part.shape, dtype, sums).as_json()
            for (name, (part, dtype, _)), sums in zip(self._sent.items(), mine, strict=True)
        }
        return {"sent": sent, "not_audited": self._unknown}

    def _check(self, copies: list[list[Any]]) -> None:
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
                raise PatchError(
                    f"some exported tensors {text}.",
                    patch=patches.of(get_per_tensor_param).id,
                    advice=_ADVICE,
                )
        if found:
            self.facts["problem"] = shortened(found)
            conflict = f"the trainer's own ranks do not agree on the weights: {shortened(found)}."
            if self._mode == "refuse":
                raise PatchError(
                    conflict,
                    patch=patches.of(get_per_tensor_param).id,
                    advice="Nothing was committed. To continue anyway, set audit=report.",
                )
            logger.error("%s", conflict)


def _by_replica(parts: list[Any], place: Any, mesh: Any) -> list[list[Any]]:
    """Add fingerprints up, by replica and tensor: each rank adds its parts to its replica's row, in one all-reduce.

    Halves of 32 bits travel as 64-bit integers, so that no sum over fewer than 2**31 ranks overflows."""
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


def native(site: Any) -> str | None:
    """Name what couples the two ranks of a mesh of 2 x 1, if verl or torch does so by now."""
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp._init_utils import HYBRID_SHARDING_STRATEGIES

    mesh = SimpleNamespace(ndim=2, shape=(2, 1), size=lambda at=None: 2 if at is None else (2, 1)[at])
    asked = getattr(site.module, site.name)(mesh)
    if asked == ShardingStrategy.NO_SHARD:
        return f"{UTILS}.get_sharding_strategy"
    if asked in HYBRID_SHARDING_STRATEGIES and _keeps(asked):
        return "torch's FSDP1, which keeps a hybrid strategy over shard groups of one rank"
    return None


def _keeps(strategy: Any) -> bool:
    """Ask the function of torch that decides whether it leaves a hybrid strategy alone whose shard group has one rank, with a
    stand-in for the state that it fills in."""
    from torch.distributed.fsdp import _init_utils

    state = SimpleNamespace(world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _init_utils._init_core_state(state, strategy, None, None, True, False, 1, 1)
    except Exception:
        return False
    return state.sharding_strategy == strategy


@patches.wrap(
    f"{UTILS}:get_sharding_strategy",
    relies_on=("device_mesh.ndim", f"{UTILS}:create_device_mesh", f"{IMPL}:FSDPEngine._build_fsdp_module"),
    native=native,
    evidence="install",
    why="With FSDP1, fsdp_size=1 and several ranks, torch averages gradients within shard groups of one "
    "rank, so that the replicas silently differ from the first step on.",
    remove_when="torch's FSDP1 couples the replicas of a hybrid strategy whose shard group has one rank.",
)
def get_sharding_strategy(original, device_mesh: Any, *args: Any, **kwargs: Any) -> Any:
    """Return NO_SHARD for a mesh of n x 1, which FSDP1 then applies over the replicas. All other meshes are right and left
    to verl.

    torch's FSDP1 turns any strategy into ``NO_SHARD`` when its shard group has one rank
    (``torch/distributed/fsdp/_init_utils.py: _init_core_state``), and then averages gradients over that group, that is,
    not at all. If it gets ``NO_SHARD``, it takes the mesh's first dimension, that of the replicas, as the group. FSDP2
    looks at the mesh alone and is right without this."""
    if device_mesh.ndim == 2 and device_mesh.size(1) == 1 and device_mesh.size(0) > 1:
        from torch.distributed.fsdp import ShardingStrategy

        return ShardingStrategy.NO_SHARD
    return original(device_mesh, *args, **kwargs)


of_verl_0_9 = Patches("fsdp", "verl>=0.9", framework="verl_0_9", scope="trainer")
gathered.before_exchange(of_verl_0_9)
