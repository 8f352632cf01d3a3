"""Run the speculative configuration that the bandit chooses for each decode batch.

Where every arm is a chain (top-k 1) SGLang's own adaptive controller does the switching, with the bandit as
its policy. It does not know trees; for these the same runtime states are built and applied here, and two
things are kept at the largest top-k, the engine's own: the number of tokens that the drafter proposes for the
next step, and the cache slots reserved for a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from flashpatch import engine, user_directories
from flashpatch.arming.site import Site
from flashpatch.errors import PatchError
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.sglang import drafter_refit, history_drafts, spec_controller
from flashpatch.patches.eagle.sglang.spec_controller import BanditStepsPolicy, SpecController
from flashpatch.patches.eagle.sglang.targets import DRAFTER, WORKER, WorkerPatch
from flashpatch.record import Contract, Patch


class TreeSwitcher:
    """Switch a worker between configurations with several top-k.

    Args:
        own: the configuration the engine was opened with, the largest.
    """

    def __init__(self, worker: Any, controller: SpecController, own: Arm) -> None:
        self.controller, self.own = controller, own
        self._worker = weakref.ref(worker)
        self.states = {own: _current_state(worker)}
        for arm in (*controller.policy.arms, Arm.DISABLE):
            if arm not in self.states:
                with _topk(worker, _topk_of(arm)):
                    steps, tokens = (arm.steps, arm.draft_tokens) if arm != Arm.DISABLE else (0, 1)
                    self.states[arm] = worker.build_adaptive_runtime_state(steps, tokens, None)

    def activate(self, batch_size: int) -> None:
        """Choose an arm and apply its runtime state, before a decode batch."""
        worker, arm = self._worker(), self.controller.choose(batch_size)
        state = self.states[arm]
        _set_topk(worker, _topk_of(arm))
        if (worker.speculative_num_steps, worker.speculative_num_draft_tokens) != (
            state.speculative_num_steps,
            state.speculative_num_draft_tokens,
        ) or worker._draft_worker.draft_attn_backend is not state.draft_attn_backend:
            worker.speculative_num_steps = -1  # else states of equal steps would be taken as equal
            worker.apply_runtime_state(state)


_trees: weakref.WeakKeyDictionary[Any, TreeSwitcher] = weakref.WeakKeyDictionary()
_reserved = 0  # slots per request and step that the largest configuration needs


def on_init_graphs(original, self, *args: Any, **kwargs: Any):
    """Around ``EAGLEWorkerV2.init_cuda_graphs``: build a runtime state per arm, before anything runs."""
    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.mem_cache import allocation_sizing
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController

    from flashpatch.patches.eagle.bandit.rank_broadcast import RankBroadcast

    global _reserved
    options = engine.options("eagle")
    if not options["adapt"] or self._draft_worker is None:
        return original(self, *args, **kwargs)
    own = Arm(self.speculative_num_steps, self.topk, self.speculative_num_draft_tokens)
    _check(self, spec_controller.engine_arms(options["arms"], own))
    broadcast = RankBroadcast(get_tp_group().cpu_group) if get_parallel().tp_size > 1 else None
    policy = spec_controller.make_policy(options, own, broadcast)
    state = Path(user_directories.expand(options["state"])) if options["state"] else None
    controller = SpecController(policy, state)
    spec_controller.add_controller(self, controller)
    _reserved = allocation_sizing.get_alloc_len_per_decode()
    if all(arm.topk <= 1 for arm in (own, *policy.arms)):
        self.adaptive_controller = AdaptiveController(self, BanditStepsPolicy(controller))
        result = original(self, *args, **kwargs)
    else:
        result = original(self, *args, **kwargs)
        with _draft_contexts(self):
            _trees[self] = TreeSwitcher(self, controller, own)
    controller.note_arms()
    return result


def _check(worker: Any, arms: tuple[Arm, ...]) -> None:
    from sglang.srt.runtime_context import get_schedule, get_spec

    def refuse(problem: str, advice: str) -> None:
        raise PatchError(problem, patch=INIT.id, target=INIT.targets[0], advice=advice)

    if get_spec().speculative_adaptive:
        refuse(
            "speculative_adaptive already lets SGLang choose the steps",
            "Leave it out, or set eagle's adapt=false.",
        )
    if any(arm.topk > 1 for arm in arms) and not get_schedule().disable_overlap_schedule:
        refuse(
            "trees cannot be switched under overlap scheduling, where the next step is prepared before this one ends",
            "Open the engine with disable_overlap_schedule, give arms with top-k 1, or set eagle's adapt=false.",
        )


def on_activate(original, self, batch_size: int):
    """Around ``activate_step_by_batch``: switch to the bandit's arm before each decode batch."""
    trees = _trees.get(self)
    if trees is None:
        return original(self, batch_size)
    trees.activate(batch_size)
    return None


def on_complete(original, self, num_correct_drafts_per_req: list[int], batch_size: int = 0):
    """Around ``on_verify_complete_cpu``: learn from the accepted counts of a batch, now on the host."""
    trees = _trees.get(self)
    if trees is not None:
        trees.controller.step_finished(num_correct_drafts_per_req, batch_size)
    original(self, num_correct_drafts_per_req, batch_size)  # here SGLang's adaptive controller learns
    drafter_refit.observe(self, history_drafts.batch_verified(self, num_correct_drafts_per_req))


def on_draft(original, self, batch: Any, *args: Any, **kwargs: Any):
    """Around ``EagleDraftWorker.draft``: cut the proposals kept for it to the arm's top-k, and let history replace drafts."""
    kept = batch.spec_info
    if kept is not None and kept.topk_p is not None and kept.topk_p.shape[1] > self.topk:
        kept.topk_p, kept.topk_index = kept.topk_p[:, : self.topk], kept.topk_index[:, : self.topk]
    verify_input = original(self, batch, *args, **kwargs)
    history_drafts.replace_chains(self, batch, verify_input)
    return verify_input


def on_extend(original, self, *args: Any, **kwargs: Any):
    """Around both draft extends: propose for the largest top-k, as the next configuration is not chosen
    yet."""
    trees = next((t for worker, t in _trees.items() if worker._draft_worker is self), None)
    if trees is None:
        return original(self, *args, **kwargs)
    own, self.topk = self.topk, trees.own.topk
    try:
        return original(self, *args, **kwargs)
    finally:
        self.topk = own


def on_reserve(original):
    """Around ``get_alloc_len_per_decode``: reserve slots for the largest configuration, whatever runs now."""
    return max(original(), _reserved)


def _current_state(worker: Any) -> Any:
    """Return the runtime state that the engine was opened with."""
    from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState

    drafter, target = worker._draft_worker, worker._target_worker.model_runner
    return SpecRuntimeState(
        speculative_num_steps=worker.speculative_num_steps,
        speculative_num_draft_tokens=worker.speculative_num_draft_tokens,
        draft_attn_backend=drafter.draft_attn_backend,
        cuda_graph_runner=drafter.cuda_graph_runner,
        target_attn_backend=target.attn_backend,
        target_graph_runner=target.decode_cuda_graph_runner,
        draft_extend_attn_backend=drafter.draft_extend_attn_backend,
        cuda_graph_runner_for_draft_extend=drafter.cuda_graph_runner_for_draft_extend,
    )


def _topk_of(arm: Arm) -> int:
    return max(1, arm.topk)


def _set_topk(worker: Any, topk: int) -> None:
    from sglang.srt.runtime_context import get_context

    if worker.topk != topk:
        worker.topk = worker._draft_worker.topk = topk
        get_context().override(INIT.id, speculative_eagle_topk=topk)


@contextmanager
def _topk(worker: Any, topk: int) -> Iterator[None]:
    """Set another top-k while a state is built. SGLang restores steps and tokens before top-k, and would
    refuse."""
    own, drafter = worker.topk, worker._draft_worker
    _set_topk(worker, topk)
    vars(drafter)["_rebuild_topk1_chain_buffers"] = lambda: None
    try:
        yield
    finally:
        del vars(drafter)["_rebuild_topk1_chain_buffers"]
        _set_topk(worker, own)


@contextmanager
def _draft_contexts(worker: Any) -> Iterator[None]:
    """Enter the contexts in which SGLang builds its own adaptive states."""
    from sglang.srt.layers.moe.utils import (
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )

    with (
        _draft_ranks(worker._draft_worker),
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
    ):
        yield


def _draft_ranks(drafter: Any) -> AbstractContextManager[None]:
    """Return ``draft_tp_context`` as SGLang enters it; it asks for something else in 0.5.21, 0.5.22 and 0.5.23."""
    from sglang.srt.speculative.spec_utils import draft_tp_context

    if hasattr(drafter, "parallel_layout"):
        return draft_tp_context(drafter.parallel_layout)
    owns_attention = drafter.draft_owns_attention
    if hasattr(drafter, "draft_tp_context"):
        return drafter.draft_tp_context(drafter.draft_runner.tp_group, owns_attention=owns_attention)
    return draft_tp_context(owns_attention)


def _undo(site: Site) -> None:
    _trees.clear()
    spec_controller.remove_controllers()
    site.unwrap()


_WHY = "How much speculation pays depends on the batch and on the drafter, and both change during a rollout."

INIT = WorkerPatch(
    id="eagle.sglang.init_cuda_graphs",
    targets=(f"{WORKER}.init_cuda_graphs",),
    wrapper=on_init_graphs,
    undo=_undo,
    contract=Contract(
        mentions=("draft_tp_context", "self.adaptive_controller.init_states"),
        exists=(
            f"{WORKER}.build_adaptive_runtime_state",
            f"{WORKER}.apply_runtime_state",
            "sglang.srt.speculative.adaptive_runtime_state:AdaptiveController",
            "sglang.srt.speculative.adaptive_runtime_state:AdaptiveSpecPolicy.get_steps_for_batch",
            "sglang.srt.speculative.adaptive_runtime_state:AdaptiveSpecPolicy.cuda_graph_bs_for_step",
            "sglang.srt.distributed.parallel_state:get_tp_group",
            "sglang.srt.mem_cache.allocation_sizing:get_alloc_len_per_decode",
        ),
    ),
    evidence="optional",
    when="called=eagle.sglang.verify",
    why=_WHY,
    how="Builds a runtime state per arm; puts the bandit into SGLang's adaptive controller, or beside it for trees.",
    upstream="AdaptiveSpeculativeParams: accepted drafts only, top-k 1 only, and constructed by name.",
)

ACTIVATE = WorkerPatch(
    id="eagle.sglang.activate_step_by_batch",
    targets=(f"{WORKER}.activate_step_by_batch",),
    wrapper=on_activate,
    contract=Contract(params=("batch_size",), mentions=("self.adaptive_controller",)),
    evidence="optional",
    when="called=eagle.sglang.verify",
    needs=("eagle.sglang.init_cuda_graphs",),
    why=_WHY,
    how="Switches to the bandit's arm before each decode batch.",
)

COMPLETE = WorkerPatch(
    id="eagle.sglang.on_verify_complete_cpu",
    targets=(f"{WORKER}.on_verify_complete_cpu",),
    wrapper=on_complete,
    contract=Contract(params=("num_correct_drafts_per_req", "batch_size")),
    evidence="optional",
    when="called=eagle.sglang.verify",
    needs=("eagle.sglang.init_cuda_graphs",),
    why=_WHY,
    how="Rewards the arm with tokens per second once the accepted counts are on the host.",
)

DRAFT = WorkerPatch(
    id="eagle.sglang.draft",
    targets=(f"{DRAFTER}.draft",),
    wrapper=on_draft,
    contract=Contract(params=("batch",), mentions=("self.topk",)),
    evidence="optional",
    when="called=eagle.sglang.verify",
    needs=("eagle.sglang.init_cuda_graphs",),
    why="The step before has proposed for the largest top-k; and earlier answers may be better drafts.",
    how="Takes the first proposals, which are the likeliest; with the option history, drafts from earlier answers.",
)


def _extend(name: str, method: str, before: str) -> Patch:
    return WorkerPatch(
        id=f"eagle.sglang.{name}",
        targets=(f"{DRAFTER}.{method}",),
        wrapper=on_extend,
        contract=Contract(params=("batch",), mentions=("self.topk",)),
        evidence="optional",
        when=f"called=eagle.sglang.{before}",
        needs=("eagle.sglang.draft",),
        why="Proposals are made before the arm that will use them is chosen.",
        how="Proposes as many as the largest arm takes.",
    )


RESERVE = WorkerPatch(
    id="eagle.sglang.get_alloc_len_per_decode",
    targets=("sglang.srt.mem_cache.allocation_sizing:get_alloc_len_per_decode",),
    wrapper=on_reserve,
    contract=Contract(mentions=("spec_steps", "spec_topk")),
    evidence="optional",
    needs=("eagle.sglang.init_cuda_graphs",),
    why="Slots are reserved for the configuration that runs now; the next may need more.",
    how="Reserves what the engine's own, largest configuration needs.",
)

PATCHES = (
    INIT,
    ACTIVATE,
    COMPLETE,
    DRAFT,
    _extend("draft_extend_for_prefill", "_draft_extend_for_prefill", "forward_prefill_batch"),
    _extend("draft_extend_for_decode", "_draft_extend_for_decode", "verify"),
    RESERVE,
)
