"""Count versions of policy and drafter.

The weights travel through SGLang's own session, with ``selector="draft"``. This module notes which models a session
changed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.patches.eagle.drafter_refit.acceptance import Acceptance
from flashpatch.patches.eagle.drafter_refit.versions import DrafterVersions, Weights
from flashpatch.patches.eagle.options import UNTIL_SGLANG
from flashpatch.patches.eagle.sglang import capture, spec_controller

if TYPE_CHECKING:
    import torch

    from flashpatch.patches._shared.fingerprint import Sums

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

patches = Patches(
    "eagle",
    "sglang>=0.5.21",
    scope="worker",
    why="SGLang does not say which drafter weights it has, nor how many of their drafts the target accepts.",
    remove_when=UNTIL_SGLANG,
)


class DrafterRefit(DrafterVersions):
    """Follow the drafter of one engine. The version is the number of updates, unless the sender names it.

    Attributes:
        own: the checkpoint that the engine was opened with.
        incoming: version and path of the weights that the open session brings, if the sender named them."""

    def __init__(self, manager: Any) -> None:
        from sglang.srt.runtime_context import get_spec

        worker = manager.draft_worker
        self.own = str(get_spec().speculative_draft_model_path or "")
        super().__init__(self.own, Acceptance(worker.speculative_num_steps), self._refresh_bandit)
        self.incoming: Weights | None = None
        self._worker = weakref.ref(worker)
        self._before_session: dict[str, Sums] = {}

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

    def session_started(self) -> None:
        """Take the weights' fingerprints before a session changes them."""
        self._before_session = self._fingerprints()

    def session_ended(self, success: bool) -> bool:
        """Record an update if the session changed the drafter; return whether it did.

        What the sender named it is the name of what it brought whole, so only if its end was a ``success``. Loaders write
        through ``.data``, which counts no version: the values themselves are compared."""
        before, self._before_session = self._before_session, {}
        incoming, self.incoming = self.incoming if success else None, None
        if incoming is None and self._fingerprints() == before:
            return False
        self.record_update(incoming or Weights(self.current.version + 1))
        ledger.flush()  # SGLang ends its processes by SIGKILL
        return True

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


def _forget(site: Site) -> None:
    _refits.clear()
    site.unwrap()


@patches.wrap(
    "sglang.srt.managers.scheduler:Scheduler.init_weight_updater",
    relies_on=("self.weight_updater", f"{MANAGER}.draft_worker", f"{MANAGER}._select_runners"),
    evidence="install",
    undo=_forget,
)
def init_weight_updater(original, self):
    """Follow acceptance from the first batch on."""
    original(self)
    refit_of(self.weight_updater)


@patches.wrap(
    f"{MANAGER}.begin_weight_update",
    relies_on=("recv_req.selector", "self._session"),
    evidence="optional",
    when="called=eagle.sglang.end_weight_update",
)
def begin_weight_update(original, self, recv_req: Any):
    """Note what the drafter's weights are before they change."""
    refit = refit_of(self) if recv_req.selector in ("draft", "all") and self._session is None else None
    if refit is not None:
        refit.session_started()
    return original(self, recv_req)


@patches.wrap(
    f"{MANAGER}.end_weight_update",
    relies_on="self._session.selector",
    evidence="optional",
    when="called=eagle.sglang.begin_weight_update",
)
def end_weight_update(original, self, recv_req: Any):
    """Count versions of policy and drafter."""
    selector = self._session.selector if self._session is not None else None
    output = original(self, recv_req)
    # else requests are running, and the end is to be asked for again
    if selector is not None and self._session is None:
        _updated(self, selector, output.success)
    return output


@patches.wrap(f"{MANAGER}.update_weights_from_disk", evidence="optional")
def update_weights_from_disk(original, self, recv_req: Any):
    """Count versions for weights from disk, which reach both models."""
    refit = refit_of(self)
    if refit is not None:
        refit.session_started()
    output = original(self, recv_req)
    _updated(self, "all", output.success)
    return output


def _updated(manager: Any, selector: str, success: bool) -> None:
    global _policy_version
    refit = refit_of(manager)
    if refit is not None and selector in ("draft", "all"):
        refit.session_ended(success)
    # A failed one too: where both models are updated, the policy's may be in place when the drafter's fails.
    if selector in ("target", "all"):
        if refit is not None:
            refit.refresh_bandit()
        _policy_version += 1
        recorder = capture.current_recorder()
        if recorder is not None:
            recorder.version = _policy_version
        ledger.note(eagle_policy=_policy_version)
        ledger.flush()  # SGLang ends its processes by SIGKILL
