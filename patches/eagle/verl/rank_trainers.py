"""Train one drafter on verl's workers: a process on each rank, which shares the rank's device only during slices.

`on_rank` runs in verl's workers and holds the rank's process; `RankTrainers` runs in the driver and has what `Job` needs of
a `Coordinator`. A process of its own keeps a fault of training, even one that kills it, out of verl's worker.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashpatch.patches.eagle.train.coordinator import Coordinator
from flashpatch.patches.eagle.train.settings import WorkerSettings

Report = Mapping[str, Any]
Call = Callable[[Sequence[int], str, Sequence[tuple]], list[Report]]
"""Calls `on_rank` on ranks, with a method and each rank's arguments; returns their answers."""

_coordinator: Coordinator | None = None  # of this rank's process; in verl's workers


def on_rank(worker: Any, method: str, *arguments: Any) -> Report:
    """Call a method of this rank's `Coordinator`; return its state.

    Args:
        worker: verl's, whose process this is; Ray runs this function there by ``__ray_call__``.
        method: ``open`` makes the coordinator from `WorkerSettings.dump`; ``meeting`` adds an address and a free port to
            the state; ``poll`` only returns it, and starts a process again that has died.
    """
    global _coordinator
    if method == "open":
        if _coordinator is None:
            settings = WorkerSettings.parse(arguments[0])
            _coordinator = Coordinator(replace(settings, device=_own_device(settings.device)))
        _coordinator.start()
        return _state(_coordinator)
    if _coordinator is None:
        raise RuntimeError("no drafter trainer was opened on this rank")
    if method == "meeting":
        return {**_state(_coordinator), "meeting": _meeting()}
    if method == "poll":
        _coordinator.restart_when_due()
        return _state(_coordinator)
    done = getattr(_coordinator, method)(*arguments)
    return {**_state(_coordinator), "done": done}


def _state(coordinator: Coordinator) -> dict[str, Any]:
    coordinator.poll()
    return {
        "state": coordinator.state,
        "pid": coordinator.pid,
        "figures": coordinator.figures,
        "drafter": str(coordinator.drafter or ""),
        "problem": coordinator.problem,
    }


def _own_device(device: str) -> str:
    """Return the device that verl's worker computes on, which may see those of other ranks too."""
    torch = sys.modules.get("torch")
    if device in ("", "cuda") and torch is not None and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return device


def _meeting() -> tuple[str, int]:
    """Return an address of this node and a port that was free a moment ago."""
    import ray

    with socket.socket() as free:
        free.bind(("", 0))
        return ray.util.get_node_ip_address(), free.getsockname()[1]


class RankTrainers:
    """Train one drafter on some of verl's ranks at a time.

    Args:
        settings: of the training processes; they keep nothing on their devices between slices.
        call: see `Call`.
        ranks: number of verl's ranks.

    Attributes:
        drafter: folder of the newest drafter, or None.
        figures: of the rank that led the last slice.
        training: the ranks of the present slice, in the order of their processes; empty between slices.
        problem: the last one of any rank, or "".
    """

    def __init__(self, settings: WorkerSettings, call: Call, ranks: int) -> None:
        self.settings, self.ranks = settings, ranks
        self.drafter: Path | None = None
        self.figures: Mapping[str, Any] = {}
        self.training: tuple[int, ...] = ()
        self.problem = ""
        self._call = call
        self._reports: dict[int, Report] = {}  # the last of each rank
        self._leader = 0

    @property
    def state(self) -> str:
        """State of the rank that led the last slice, see `Coordinator`."""
        return str(self._reports.get(self._leader, {}).get("state", "down"))

    @property
    def pid(self) -> int | None:
        """Process id on that rank's node."""
        return self._reports.get(self._leader, {}).get("pid")

    def start(self) -> bool:
        """Start a process on each rank, for the rank's own device, which shares out the buffer's bounds.

        A later slice takes those that are ready.
        """
        settings = replace(
            self.settings,
            device=self.settings.device.partition(":")[0],
            samples=max(1, self.settings.samples // self.ranks),
            bytes=max(1, self.settings.bytes // self.ranks),
            release=True,
            ranks=self.ranks,
        )
        made = [replace(settings, rank=rank) for rank in self._all()]
        self._ask(self._all(), "open", [(one.dump(),) for one in made])
        return True

    def train(self, seconds: float, ranks: Sequence[int] | None = None, steps: int | None = None) -> bool:
        """Begin a slice on those of the ranks that are ready; return whether one is.

        Args:
            seconds: most seconds of the slice.
            ranks: all by default.
            steps: most steps.
        """
        if self.training:
            return False
        reports = self._ask(self._all() if ranks is None else ranks, "poll")
        ready = [rank for rank, report in reports.items() if report["state"] == "idle"]
        if not ready:
            return False
        address, port = self._ask(ready[:1], "meeting")[ready[0]]["meeting"]
        self.training, self._leader = tuple(ready), ready[0]
        groups = [
            {"address": address, "port": port, "rank": rank, "ranks": len(ready)}
            for rank in range(len(ready))
        ]
        self._ask(ready, "train", [(seconds, steps, group) for group in groups])
        return True

    def stop(self, limit: float) -> bool:
        """End the slice; return whether all of its ranks gave their devices back within ``limit`` seconds.

        Those that did not are killed. Files are written after that, see `wait_idle`.
        """
        ranks, self.training = self.training, ()
        return all(one["done"] for one in self._ask(ranks, "wait_released", [(limit,)] * len(ranks)).values())

    def is_training(self) -> bool:
        """Return whether a rank of the present slice is not done."""
        reports = self._ask(self.training, "poll")
        if not any(one["state"] in ("training", "stopping") for one in reports.values()):
            self.training = ()
        return bool(self.training)

    def wait_idle(self, limit: float) -> bool:
        """End the slice, and wait for its files; kill processes that take more than ``limit`` seconds."""
        self.training = ()
        reports = self._ask(self._all(), "wait_idle", [(limit,)] * self.ranks)
        return all(one["done"] for one in reports.values())

    def load(self, folder: str | Path) -> bool:
        """Continue from other weights, as after a rollback."""
        return bool(self._ask([0], "load", [(str(folder),)])[0]["done"])

    def target(self, folder: str | Path) -> bool:
        """Send the folder of the policy's present embedding and head to all ranks."""
        reports = self._ask(self._all(), "target", [(str(folder),)] * self.ranks)
        return all(one["done"] for one in reports.values())

    def keep(self, folders: Iterable[str]) -> bool:
        """Name the drafters that engines may return to, which stay on disk, to all ranks."""
        reports = self._ask(self._all(), "keep", [(list(folders),)] * self.ranks)
        return all(one["done"] for one in reports.values())

    def close(self) -> None:
        """End all processes. Never raises: verl's workers may have ended, and theirs with them."""
        with contextlib.suppress(Exception):
            self._call(self._all(), "close", [()] * self.ranks)

    def _all(self) -> Sequence[int]:
        return range(self.ranks)

    def _ask(
        self, ranks: Sequence[int], method: str, arguments: Sequence[tuple] | None = None
    ) -> dict[int, Report]:
        """Call ranks, and note what they report."""
        if not ranks:
            return {}
        answers = self._call(ranks, method, arguments or [()] * len(ranks))
        reports = dict(zip(ranks, answers, strict=True))
        for rank, report in reports.items():
            before = self._reports.get(rank, {})
            if report["problem"] and report["problem"] != before.get("problem"):
                self.problem = f"rank {rank}: {report['problem']}"
            if report["drafter"] and report["drafter"] != before.get("drafter"):
                self.drafter = Path(report["drafter"])
        self._reports.update(reports)
        if self._leader in reports:
            self.figures = reports[self._leader]["figures"]
        return reports
