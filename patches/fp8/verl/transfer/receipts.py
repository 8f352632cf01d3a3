"""Write receipts of finished syncs, and check that all ranks hold one policy after them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from flashpatch.errors import PatchError

if TYPE_CHECKING:
    from flashpatch.patches.fp8.verl.transfer.weight_sync import Sending

ID = "fp8.verl.checkpoint_manager_update_weights"


def receipt(
    sending: Sending, replica: int, rank: int, workers: list[dict] | None, seconds: float, called: bool
) -> dict[str, Any]:
    """Return the receipt of one finished sync, of plain values, in the sending process.

    Args:
        sending: what was sent.
        replica: number of the rollout replica; rank: of this process within it.
        workers: the receipts of the replica's workers; None if another rank has them.
        seconds: duration of the whole sync.
        called: whether this process called the server, so that it must have the workers' receipts."""
    told = {
        "judged": True,
        "replica": replica,
        "rank": rank,
        "called": called,
        "workers": workers,
        "seconds": seconds,
    }
    of_sending = ("step", "id", "export", "gather", "send", "waited", "bytes", "tensors")
    return {**told, **{name: getattr(sending, name) for name in of_sending}}


class WorkerVersions:
    """The version that each worker held after the last sync, kept by the driver."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], list[int]] = {}

    def check(self, step: int | None, given: Sequence[Sequence[Mapping[str, Any]] | None]) -> None:
        """Check that all workers of all replicas took the same step, each as exactly one new version.

        Args:
            step: the driver's ``global_steps``.
            given: per sending rank its syncs since the last check, None if FlashPatch is missing.

        Raises:
            PatchError: names each replica and rank that differs, with its versions."""
        problems = [problem for rank, syncs in enumerate(given) for problem in self._rank(rank, step, syncs)]
        problems += _several_versions(_judged(given))
        problems += _several_checksums(_judged(given))
        problems += _several_adapters(_judged(given))
        if problems:
            raise PatchError(
                f"the rollouts do not hold one policy after the sync of step {step}: {'; '.join(problems)}.",
                patch=ID,
                advice="The trainer stops; the rollouts' logs say what happened to them.",
            )

    def _rank(self, rank: int, step: int | None, syncs: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
        if syncs is None:
            yield f"sending rank {rank} carries no FlashPatch"
        elif not syncs:
            yield f"sending rank {rank} took no part"
        for sync in (sync for sync in syncs or () if sync["judged"]):
            where = f"replica {sync['replica']}"
            if sync["step"] != step:
                yield f"{where} was sent step {sync['step']} by rank {rank}"
            if sync["called"] and not sync["workers"]:
                yield f"the server of {where} gave no receipt (is FlashPatch in its process?)"
            for worker in sync["workers"] or ():
                yield from (
                    f"{where}, rank {worker['rank']}: {problem}" for problem in self._worker(sync, worker)
                )
            for world in {worker["world"] for worker in sync["workers"] or ()} - {None}:
                if len(sync["workers"]) != world:
                    yield f"{len(sync['workers'])} of {world} ranks of {where} gave a receipt"

    def _worker(self, sync: Mapping[str, Any], worker: Mapping[str, Any]) -> Iterator[str]:
        before, after = list(worker["before"]), list(worker["after"])
        me = (worker["host"], worker["pid"])
        last, self._last[me] = self._last.get(me), after
        if worker["id"] != sync["id"]:
            yield f"its receipt is of another sync (step {worker['step']})"
        if last is not None and last != before:
            yield f"it held version {_text(before)}, though the sync before left it at {_text(last)}"
        if worker["adapter"]:
            if worker.get("adapters") == {}:
                yield "it was sent a LoRA adapter and lists none"
            return
        if not after:
            yield "it has no model that can be updated"
        steps = [new - old for old, new in zip(before, after)]
        if any(step < 1 or (step > 1 and not worker["retry"]) for step in steps) or len(before) != len(after):
            yield f"version {_text(before)} became {_text(after)}, not one new one"
        for state in worker["states"]:
            if state != "ready":
                yield f"its policy is {state}"


def _judged(given: Sequence[Sequence[Mapping[str, Any]] | None]) -> list[list[Mapping[str, Any]]]:
    return [[sync for sync in syncs or () if sync["judged"]] for syncs in given]


def _several_versions(given: Sequence[Sequence[Mapping[str, Any]] | None]) -> Iterator[str]:
    """Name replicas whose ranks ended at different versions, or without a receipt."""
    versions: dict[int, dict[str, list[int]]] = {}
    for sync in (sync for syncs in given for sync in syncs or ()):
        mine = versions.setdefault(sync["replica"], {})
        for worker in sync["workers"] or ():
            mine.setdefault(str(list(worker["after"])), []).append(worker["rank"])
    for replica, held in sorted(versions.items()):
        if not held:
            yield f"no worker of replica {replica} gave a receipt"
        elif len(held) > 1 and not _successive(given, replica):
            texts = (f"rank {ranks} at {version}" for version, ranks in sorted(held.items()))
            yield f"replica {replica} holds several versions: {', '.join(texts)}"


def _several_checksums(given: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Name replicas whose weights differ from others' that are stored alike."""
    held: dict[tuple[int, int, str], dict[int, str]] = {}  # rank, model, storage -> replica -> checksum
    for sync in (sync for syncs in given for sync in syncs):
        for worker in sync["workers"] or ():
            for model, text in enumerate(worker.get("checksums", ())):
                stored, _, checksum = text.rpartition(" ")
                held.setdefault((worker["rank"], model, stored), {})[sync["replica"]] = checksum
    for (rank, _, _), found in sorted(held.items()):
        if len(set(found.values())) > 1:
            texts = ", ".join(f"replica {replica} {checksum}" for replica, checksum in sorted(found.items()))
            yield f"rank {rank} does not hold the same weights everywhere: {texts}"


def _several_adapters(given: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Name workers whose LoRA adapters differ from others' after the last sync."""
    last: dict[tuple[int, int], Mapping[str, str]] = {}
    for sync in (sync for syncs in given for sync in syncs):
        last.update(
            {(sync["replica"], one["rank"]): one.get("adapters") or {} for one in sync["workers"] or ()}
        )
    if len({tuple(sorted(adapters.items())) for adapters in last.values()}) > 1:
        texts = (
            f"replica {replica}, rank {rank} {held or 'none'}"
            for (replica, rank), held in sorted(last.items())
        )
        yield f"LoRA adapters differ: {'; '.join(map(str, texts))}"


def _successive(given: Sequence[Sequence[Mapping[str, Any]] | None], replica: int) -> bool:
    """Whether a replica's ranks end at one version, though several syncs came in a row."""
    last = {}
    for sync in (sync for syncs in given for sync in syncs or () if sync["replica"] == replica):
        last.update({(w["host"], w["pid"], w["rank"]): tuple(w["after"]) for w in sync["workers"] or ()})
    return len(set(last.values())) == 1


def metrics(given: Sequence[Sequence[Mapping[str, Any]] | None]) -> dict[str, float]:
    """Return the numbers of one sync under verl's names.

    Seconds are those of the slowest rank, bytes the sum over sending ranks.

    ``gather`` is the trainer's preparation and its generator of weights, ``load`` the engine's loading of buckets,
    ``process`` its work before and after, ``transfer`` what the sending took besides generator and loading,
    ``total`` all."""
    syncs = [sync for given_by in _judged(given) for sync in given_by]
    workers = [worker for sync in syncs for worker in sync["workers"] or ()]
    slowest: dict[str, float] = {
        "gather": max((sync["export"] + sync["gather"] for sync in syncs), default=0.0),
        "transfer": max((_transfer(sync) for sync in syncs), default=0.0),
        "load": max((worker["load"] for worker in workers), default=0.0),
        "process": max((worker["process"] for worker in workers), default=0.0),
        "total": max((sync["export"] + sync["seconds"] for sync in syncs), default=0.0),
    }
    return {
        **{f"timing_s/sync/{name}": seconds for name, seconds in slowest.items()},
        "sync/bytes": float(sum(sync["bytes"] for sync in syncs)),
        "sync/tensors": float(max((sync["tensors"] for sync in syncs), default=0)),
        "sync/policy_version": float(max((v for worker in workers for v in worker["after"]), default=0)),
    }


def wide(given: Sequence[Sequence[Mapping[str, Any]] | None]) -> set[str] | None:
    """Return the names of weights that some worker holds in float32; None if one cannot tell, or there is no receipt."""
    workers = [worker for sync in chain(*_judged(given)) for worker in sync["workers"] or ()]
    said = [worker.get("wide") for worker in workers]
    return None if None in said or not said else set(chain(*(names or () for names in said)))


def _transfer(sync: Mapping[str, Any]) -> float:
    load = max((worker["load"] for worker in sync["workers"] or ()), default=sync["waited"])
    return max(sync["send"] - sync["gather"] - load, 0.0)


def _text(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions)) or "none"
