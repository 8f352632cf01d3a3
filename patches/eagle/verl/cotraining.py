"""The drafter of one verl job: trained while rollouts rest, newer weights for every replica.

Nothing here stops a job. Whatever fails, the target's verification keeps every token right; what is lost is
speed, and the log, the ledger and the metrics say so.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.patches.eagle.train.coordinator import Coordinator
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.vllm.drafter_refit import FLUSH, SAVE_EMBEDDINGS, UPDATE

logger = logging.getLogger("flashpatch.eagle")

Call = Callable[[str, tuple], list[Any]]
"""Calls a worker method on every replica; one list of its workers' answers per replica."""

_KEPT = 2  # folders of embeddings and head: the trainer's, and the one it is told of next


class Job:
    """Trains in the pauses of one job's rollouts.

    Args:
        settings: of the training process, all but ``ring``, which the replicas know.
        slice: seconds of training between two rollouts, at most.
        timeout: seconds to wait for the trainer when rollouts are about to go on.

    Attributes:
        coordinator: of the training process; None until a replica has said where it captures.
        version: drafters sent to the replicas.
        metrics: of the last pause, ``eagle/...``.
    """

    def __init__(self, settings: Mapping[str, Any], slice: float, timeout: float) -> None:
        self.settings, self.slice, self.timeout = dict(settings), slice, timeout
        self.coordinator: Coordinator | None = None
        self.version = 0
        self.metrics: dict[str, float] = {}
        self._sent: Path | None = None
        self._told = ""

    def idle(self) -> None:
        """Rollouts are over for now: the trainer may work."""
        if self.coordinator is not None:
            self.coordinator.train(self.slice)

    def updated(self, call: Call, step: int | None) -> None:
        """The replicas have a new policy, and their next rollout has not begun."""
        try:
            self._updated(call, step)
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}")

    def _updated(self, call: Call, step: int | None) -> None:
        counts = [first for answers in call(FLUSH, ()) for first in answers[:1] if first]
        if not self._meet(counts):
            return
        self.coordinator.wait_idle(self.timeout)
        self._follow(call, counts)
        drafter = self.coordinator.drafter
        if drafter is not None and drafter != self._sent:
            self._send(call, drafter)
        self._share(call, step)
        self._report(counts)

    def close(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()

    def _meet(self, counts: Iterable[Mapping[str, Any]]) -> bool:
        """Start the trainer once it is known where samples are; whether there is one."""
        if self.coordinator is not None:
            return True
        rings = sorted({str(one["ring"]) for one in counts if "ring" in one})
        if len(rings) != 1:
            self._say(f"no drafter is trained: replicas capture to {', '.join(rings) or 'nowhere'}")
            return False
        settings, environment = _placed(WorkerSettings.of({**self.settings, "ring": rings[0]}))
        self.coordinator = Coordinator(settings, environment=environment)
        return self.coordinator.start()

    def _follow(self, call: Call, counts: list[Mapping[str, Any]]) -> None:
        """Where a replica went back to older weights, so do the others and the trainer."""
        back = [one["drafter_path"] for one in counts if one.get("drafter", self.version) < self.version]
        if back and self._sent is not None:
            self._say(f"drafter {self.version} was taken back by {len(back)} of {len(counts)} replicas")
            self._sent = Path(back[0])
            self.coordinator.load(self._sent)
            self.coordinator.drafter = None
            if len(back) < len(counts):
                self._send(call, self._sent)

    def _send(self, call: Call, drafter: Path) -> None:
        self._sent = drafter  # not again, whatever comes of it
        try:
            call(UPDATE, (str(drafter), self.version + 1))
            self.version += 1
        except Exception as error:  # the old one goes on, and with it every token
            self._say(f"the replicas did not take drafter {drafter.name}: {error}")

    def _share(self, call: Call, step: int | None) -> None:
        """Tell the trainer the policy's present embeddings and head."""
        folder = Path(self.settings["folder"])
        target = folder / f"shared-{step or 0:09d}"
        try:
            call(SAVE_EMBEDDINGS, (str(target),))
        except Exception as error:
            self._say(f"the trainer keeps older embeddings and head: {error}")
            return
        self.coordinator.target(target)
        for old in sorted(folder.glob("shared-*"))[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def _report(self, counts: list[Mapping[str, Any]]) -> None:
        figures, lengths = (
            self.coordinator.figures,
            [one["acceptance"] for one in counts if one.get("acceptance")],
        )
        self.metrics = {
            "eagle/drafter_version": float(self.version),
            "eagle/trained_steps": float(figures.get("step", 0)),
            "eagle/samples": float(figures.get("taken", 0)),
            "eagle/captured": float(sum(one.get("requests", 0) for one in counts)),
        }
        if lengths:
            self.metrics["eagle/acceptance_length"] = sum(lengths) / len(lengths)
        if "loss" in figures:
            self.metrics["eagle/drafter_loss"] = float(figures["loss"])
        ledger.note(
            eagle_trainer={"state": self.coordinator.state, "pid": self.coordinator.pid, **self.metrics}
        )
        if self.coordinator.problem:
            self._say(self.coordinator.problem)

    def _say(self, problem: str) -> None:
        if problem != self._told:
            logger.warning("%s", problem)
            ledger.note(eagle_problem=problem)
        self._told = problem


def _placed(settings: WorkerSettings) -> tuple[WorkerSettings, dict[str, str]]:
    """Settings and environment that let the process see the accelerator ``cuda:N`` of this machine: Ray hides all
    of them from the driver, whose child it is."""
    kind, _, number = settings.device.partition(":")
    if kind != "cuda" or not number:
        return settings, {}
    return replace(settings, device=kind), {"CUDA_VISIBLE_DEVICES": number}
