"""Load drafters, and count versions of policy and drafter, whoever sends them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.patches.eagle.drafter_refit.acceptance import Acceptance
from flashpatch.patches.eagle.drafter_refit.versions import DrafterVersions, Weights
from flashpatch.patches.eagle.options import SGLANG, UNTIL_SGLANG
from flashpatch.patches.eagle.sglang import capture, spec_controller

if TYPE_CHECKING:
    import torch

    from flashpatch.patches._shared.fingerprint import Sums

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_DISTRIBUTED = f"{MANAGER}.update_weights_from_distributed"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"

patches = Patches(
    "eagle",
    SGLANG,
    scope="worker",
    why="SGLang does not say which drafter weights it has, nor how many of their drafts the target accepts.",
    remove_when=UNTIL_SGLANG,
)


class DrafterRefit(DrafterVersions):
    """Follow the drafter of one engine. The version is the number of updates, unless the sender names it.

    Attributes:
        own: the checkpoint that the engine was opened with."""

    def __init__(self, manager: Any) -> None:
        from sglang.srt.runtime_context import get_spec

        worker = manager.draft_worker
        self.own = str(get_spec().speculative_draft_model_path or "")
        super().__init__(self.own, Acceptance(worker.speculative_num_steps), self._refresh_bandit)
        self._worker = weakref.ref(worker)
        self._known = self._fingerprints()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the drafter's own parameters, without embeddings and head that it shares with the target."""
        worker = self._worker()
        target = {id(p) for p in worker._target_worker.model_runner.model.parameters()}
        drafts = worker._draft_worker.draft_runner.model.named_parameters()
        return {name: p for name, p in drafts if id(p) not in target}

    def shared(self) -> set[str]:
        """Return the names of the drafter's modules whose weights are the target's."""
        worker = self._worker()
        own = self.weights().keys()
        names = (name for name, _ in worker._draft_worker.draft_runner.model.named_parameters())
        return {name.split(".")[-2] for name in names if name not in own}

    def load(self, tensors: dict[str, torch.Tensor], named: Weights) -> None:
        """Load new weights, through the fp8 family if it is on and wraps ``load_weights``, else as SGLang updates a model.
        Raises what they are refused with."""
        runner = self._worker()._draft_worker.draft_runner
        try:
            if engine.enabled("fp8") and "load_weights" in vars(runner.model):
                runner.model.load_weights(iter(tensors.items()), partial=True)
            else:
                _update(runner.weight_updater, list(tensors.items()))
        except BaseException:
            self.compare()
            raise
        self._known = self._fingerprints()
        self.record_update(named)

    def compare(self) -> None:
        """Record an update if the drafter's weights are others than before.

        Loaders write through ``.data``, which counts no version: the values themselves are compared."""
        before, self._known = self._known, self._fingerprints()
        if self._known != before:
            self.record_update(Weights(self.current.version + 1))
            ledger.flush()  # SGLang ends its processes by SIGKILL

    def count(self, accepted: list[int], steps: int) -> None:
        """Add a batch that verified ``steps`` drafts in depth per request; ``accepted`` drafts per request."""
        if steps:
            self.acceptance.add(sum(min(count + 1, steps) for count in accepted), sum(accepted))

    def _fingerprints(self) -> dict[str, Sums]:
        from flashpatch.patches._shared import fingerprint

        return {name: fingerprint.of(p) for name, p in self.weights().items()}

    def _refresh_bandit(self) -> None:
        controller = spec_controller.controllers.get(self._worker())
        if controller is not None:
            controller.policy.refresh()


_refits: weakref.WeakKeyDictionary[Any, DrafterRefit] = weakref.WeakKeyDictionary()
_policy_version = 0
_counted = -1  # batches that had run when the policy's version was counted last


def refit_of(manager: Any) -> DrafterRefit | None:
    """Return the `DrafterRefit` behind a weight updater; None if no model of its own drafts."""
    worker = manager.draft_worker
    if worker is None or getattr(worker, "_draft_worker", None) is None:
        return None
    if worker not in _refits:
        _refits[worker] = DrafterRefit(manager)
    return _refits[worker]


def observe(worker: Any, accepted: list[int]) -> None:
    """Add a batch with the accepted drafts of each request."""
    refit, controller = _refits.get(worker), spec_controller.controllers.get(worker)
    if refit is not None:
        steps = controller.finished.steps if controller is not None else worker.speculative_num_steps
        refit.count(accepted, steps)


def _update(updater: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load tensors as SGLang does in a session of the drafter alone; before 0.5.21 it has none."""
    in_session = hasattr(updater, "begin_weight_update")
    if in_session:
        updater.begin_weight_update()
    try:
        done, message = updater.update_weights_from_tensor(tensors, None)
    finally:
        if in_session:
            updater.end_weight_update(run_post_load=False)
    if not done:
        raise RuntimeError(message)


def _forget(site: Site) -> None:
    _refits.clear()
    site.unwrap()


@patches.wrap(
    f"{SCHEDULER}.init_weight_updater",
    relies_on=(
        "self.weight_updater",
        f"{MANAGER}.draft_worker",
        f"{MANAGER}.scheduler",
        f"{SCHEDULER}.forward_ct",
        f"{UPDATER}.update_weights_from_tensor",
    ),
    since={"0.5.21": (f"{MANAGER}._session", f"{UPDATER}.begin_weight_update")},
    evidence="install",
    undo=_forget,
)
def init_weight_updater(original, self):
    """Follow acceptance from the first batch on."""
    original(self)
    refit_of(self.weight_updater)


@patches.wrap(
    f"{MANAGER}.end_weight_update",
    f"{MANAGER}.update_weights_from_tensor",  # before 0.5.21, which has no sessions
    evidence="optional",
)
def end_weight_update(original, self, recv_req: Any):
    """Count versions of policy and drafter, at the end of a session where SGLang has them."""
    session = getattr(self, "_session", None)
    if session is None:
        return update_weights_from_disk(original, self, recv_req)
    output = original(self, recv_req)
    if self._session is None:  # else requests are running, and the end is to be asked for again
        _updated(self, session.selector)
    return output


@patches.wrap(_DISTRIBUTED, id="eagle.sglang.update_weights_from_distributed", evidence="optional")
@patches.wrap(f"{MANAGER}.update_weights_from_disk", evidence="optional")
def update_weights_from_disk(original, self, recv_req: Any):
    """Count versions for weights that come outside of a session; requests with no batch between them are one update."""
    output = original(self, recv_req)
    if getattr(self, "_session", None) is None:
        _updated(self, "target" if getattr(recv_req, "disable_draft_model", False) else "all")
    return output


def _updated(manager: Any, selector: str) -> None:
    """Count a failed update too: if both models are updated, the policy's may be in place when the drafter's fails."""
    global _policy_version, _counted
    refit = refit_of(manager)
    if refit is not None and selector in ("draft", "all"):
        refit.compare()
    batches = manager.scheduler.forward_ct
    if selector in ("target", "all") and batches != _counted:
        _counted = batches
        if refit is not None:
            refit.refresh_bandit()
        _policy_version += 1
        recorder = capture.current_recorder()
        if recorder is not None:
            recorder.version = _policy_version
        ledger.note(eagle_policy=_policy_version)
        ledger.flush()  # SGLang ends its processes by SIGKILL
