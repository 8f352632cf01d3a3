"""New drafter weights: versions recorded, acceptance compared, worse ones taken back.

The weights travel through SGLang's own session, with ``selector="draft"`` (see `send`). This module notes which
models a session changed, keeps what the drafter was before, and puts that back when the target accepts less.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.errors import PatchError
from flashpatch.patches.eagle.drafter_refit.acceptance_check import Tally, Trial
from flashpatch.patches.eagle.sglang import capture, spec_arms
from flashpatch.patches.eagle.sglang.targets import MANAGER, TEXT
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("flashpatch.eagle")


class Drafter:
    """The drafter of one engine.

    Attributes:
        version: updates taken, those taken back not counted.
        trial: compares acceptance before and after an update.
    """

    def __init__(self, manager: Any, options: Any) -> None:
        self._worker = weakref.ref(manager.draft_worker)
        self.version = 0
        self.trial = Trial(
            manager.draft_worker.speculative_num_steps, options["rollback_steps"], options["rollback"]
        )
        self.keeps = options["rollback"] < 1
        self._kept: dict[str, torch.Tensor] | None = None
        self._was: dict[str, torch.Tensor] = {}

    def weights(self) -> dict[str, torch.Tensor]:
        """Its own parameters; embeddings and head that it shares with the target are the target's."""
        worker = self._worker()
        target = {id(p) for p in worker._target_worker.model_runner.model.parameters()}
        drafts = worker._draft_worker.draft_runner.model.named_parameters()
        return {name: p for name, p in drafts if id(p) not in target}

    def before(self) -> None:
        """A session begins."""
        self._was = {name: p.detach().clone() for name, p in self.weights().items()}

    def after(self) -> bool:
        """The session is over; whether the drafter has new weights.

        Loaders write through ``.data``, which counts no version: the values themselves are compared.
        """
        import torch

        was, self._was = self._was, {}
        if all(torch.equal(p, was[name]) for name, p in self.weights().items() if name in was):
            return False
        if self.keeps and self._kept is None:  # the first of several in a row keeps what was judged last
            self._kept = was
        self.version += 1
        length = self.trial.begin()
        logger.info("drafter version %d; acceptance length before it %.2f", self.version, length)
        _record(eagle_drafter=self.version, eagle_sync={"before": round(length, 3)})
        self.look_again()
        return True

    def observe(self, accepted: list[int], steps: int) -> None:
        """A batch was verified with ``steps`` drafts in depth per request."""
        if not steps:
            return
        tried = sum(min(count + 1, steps) for count in accepted)
        verdict = self.trial.step(Tally(tried, sum(accepted)))
        if verdict is None:
            return
        before, after, good = verdict
        if not good and self._kept is not None:
            self._take_back()
        elif not good:
            good = True  # nothing was kept
        self._kept = None
        word = "kept" if good else "taken back"
        logger.info("drafter: acceptance length %.2f, before %.2f: %s", after, before, word)
        _record(eagle_sync={"before": round(before, 3), "after": round(after, 3), "verdict": word})

    def _take_back(self) -> None:
        import torch

        weights = self.weights()
        device = next(iter(weights.values())).device
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)  # a batch may be reading them
        with torch.no_grad():
            for name, kept in self._kept.items():
                weights[name].copy_(kept)
        self.version -= 1
        _record(eagle_drafter=self.version)
        self.look_again()

    def look_again(self) -> None:
        """Tell the bandit that drafter or policy are not what they were."""
        chooser = spec_arms.chooser_of(self._worker())
        if chooser is not None:
            chooser.policy.refresh()


_drafters: weakref.WeakKeyDictionary[Any, Drafter] = weakref.WeakKeyDictionary()
_policy = 0


def drafter_of(manager: Any) -> Drafter | None:
    """The drafter behind a weight updater; None where nothing drafts with a model of its own."""
    worker = manager.draft_worker
    if worker is None or getattr(worker, "_draft_worker", None) is None:
        return None
    if worker not in _drafters:
        _drafters[worker] = Drafter(manager, engine.options("eagle"))
    return _drafters[worker]


def observe(worker: Any, accepted: list[int]) -> None:
    """Called with the accepted drafts of each batch."""
    drafter, chooser = _drafters.get(worker), spec_arms.chooser_of(worker)
    if drafter is not None:
        drafter.observe(accepted, chooser.ran.steps if chooser is not None else worker.speculative_num_steps)


def on_init(original, self, *args: Any, **kwargs: Any):
    """Around ``SchedulerWeightUpdaterManager.__post_init__``: acceptance is followed from the first batch."""
    original(self, *args, **kwargs)
    drafter_of(self)


def on_begin(original, self, recv_req: Any):
    """Around ``begin_weight_update``."""
    drafter = drafter_of(self) if recv_req.selector in ("draft", "all") and self._session is None else None
    if drafter is not None:
        drafter.before()
    return original(self, recv_req)


def on_end(original, self, recv_req: Any):
    """Around ``end_weight_update``."""
    selector = self._session.selector if self._session is not None else None
    output = original(self, recv_req)
    if selector is not None:
        _changed(self, selector, output.success)
    return output


def on_disk(original, self, recv_req: Any):
    """Around ``update_weights_from_disk``, which reaches both models."""
    drafter = drafter_of(self)
    if drafter is not None:
        drafter.before()
    output = original(self, recv_req)
    _changed(self, "all", output.success)
    return output


def _changed(manager: Any, selector: str, success: bool) -> None:
    global _policy
    drafter = drafter_of(manager)
    if drafter is not None and selector in ("draft", "all"):
        drafter.after()
    if success and selector in ("target", "all"):
        if drafter is not None:
            drafter.look_again()
        _policy += 1
        record = capture.recorder()
        if record is not None:
            record.version = _policy
        _record(eagle_policy=_policy)


def _record(**values: Any) -> None:
    ledger.note(**values)
    ledger.flush()  # SGLang ends its processes by SIGKILL


def send(llm: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """New weights for the drafter of an ``sglang.Engine``, in one session; the target stays as it is.

    Args:
        llm: the engine, in this process.
        tensors: names as in the drafter's checkpoint.

    Raises:
        PatchError: the engine did not take them; the message is the engine's.
    """
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    def check(done: bool, message: str) -> None:
        if not done:
            raise PatchError(
                f"the drafter's weights were not taken: {message}",
                patch=END.id,
                advice="Send the tensors of the drafter's checkpoint, under their names there.",
            )

    check(*llm.begin_weight_update("draft"))
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=llm._serialize_tensors_per_rank(list(tensors), None),
        selector="draft",
        flush_cache=True,
    )
    try:
        check(*llm.loop.run_until_complete(llm.tokenizer_manager.update_weights_from_tensor(request, None)))
    finally:
        ended = llm.end_weight_update()
    check(*ended)


def _undo(site: Site) -> None:
    _drafters.clear()
    site.unwrap()


_WHY = "Drafter weights that the target accepts less make every following step slower, and nobody is told."

FOLLOW = Patch(
    id="eagle.sglang.weight_updater_manager_post_init",
    targets=(f"{MANAGER}.__post_init__",),
    wrapper=on_init,
    undo=_undo,
    contract=Contract(exists=(f"{MANAGER}.draft_worker", f"{MANAGER}._select_runners")),
    evidence="install",
    needs=("eagle.sglang.on_verify_complete_cpu",),
    why=_WHY,
    how="Follows how much the target accepts from the first batch on.",
    **TEXT,
)

BEGIN = Patch(
    id="eagle.sglang.begin_weight_update",
    targets=(f"{MANAGER}.begin_weight_update",),
    wrapper=on_begin,
    contract=Contract(params=("recv_req",), mentions=("recv_req.selector", "self._session")),
    evidence="optional",
    needs=("eagle.sglang.weight_updater_manager_post_init",),
    why=_WHY,
    how="Keeps the drafter's weights before they change.",
    **TEXT,
)

END = Patch(
    id="eagle.sglang.end_weight_update",
    targets=(f"{MANAGER}.end_weight_update",),
    wrapper=on_end,
    contract=Contract(params=("recv_req",), mentions=("self._session.selector",)),
    evidence="optional",
    needs=("eagle.sglang.begin_weight_update",),
    why=_WHY,
    how="Counts versions of policy and drafter; the update is judged over the following steps.",
    **TEXT,
)

DISK = Patch(
    id="eagle.sglang.update_weights_from_disk",
    targets=(f"{MANAGER}.update_weights_from_disk",),
    wrapper=on_disk,
    contract=Contract(params=("recv_req",)),
    evidence="optional",
    needs=("eagle.sglang.weight_updater_manager_post_init",),
    why=_WHY,
    how="The same for weights from disk.",
    **TEXT,
)

PATCHES = (FOLLOW, BEGIN, END, DISK)
