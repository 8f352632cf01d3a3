"""Run the speculative configuration that the bandit chooses for each decode batch.

If every arm is a chain (top-k 1) SGLang's own adaptive controller does the switching, with the bandit as
its policy. It does not know trees; for these the same runtime states are built and applied here, and two
things are kept at the largest top-k, the engine's own: the number of tokens that the drafter proposes for the
next step, and the cache slots reserved for a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from flashpatch import engine
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import having
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.options import SGLANG, UNTIL_SGLANG
from flashpatch.patches.eagle.sglang import drafter_refit, history_drafts, spec_controller
from flashpatch.patches.eagle.sglang.capture import WORKER
from flashpatch.patches.eagle.sglang.spec_controller import BanditStepsPolicy, SpecController

_DRAFTER = "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker"
_ADAPTIVE = "sglang.srt.speculative.adaptive_runtime_state"
_WHY = "How much speculation pays depends on the batch and on the drafter, and both change during a rollout."

patches = Patches("eagle", SGLANG, scope="worker", evidence="optional", remove_when=UNTIL_SGLANG)


class TreeSwitcher:
    """Switch a worker between configurations with several top-k.

    Args:
        own: the configuration the engine was opened with, the largest."""

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


def _forget(site: Site) -> None:
    _trees.clear()
    spec_controller.controllers.clear()
    site.unwrap()


@patches.wrap(
    f"{WORKER}.init_cuda_graphs",
    relies_on=(
        "draft_tp_context",
        "self.adaptive_controller.init_states",
        f"{WORKER}.build_adaptive_runtime_state",
        f"{WORKER}.apply_runtime_state",
        f"{_ADAPTIVE}:AdaptiveController.params",
        "sglang.srt.distributed.parallel_state:get_tp_group",
        "sglang.srt.mem_cache.allocation_sizing:get_alloc_len_per_decode",
    ),
    since={
        "0.5.20": (
            f"{_ADAPTIVE}:AdaptiveSpecPolicy.get_steps_for_batch",
            f"{_ADAPTIVE}:AdaptiveSpecPolicy.cuda_graph_bs_for_step",
        )
    },
    when="called=eagle.sglang.verify",
    why=_WHY,
    upstream="AdaptiveSpeculativeParams: accepted drafts only, top-k 1 only, and constructed by name.",
    undo=_forget,
)
def init_cuda_graphs(original, self, *args: Any, **kwargs: Any):
    """Build a runtime state per arm; put the bandit into SGLang's adaptive controller, or beside it for trees."""
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
    _check(spec_controller.engine_arms(options["arms"], own))
    broadcast = RankBroadcast(get_tp_group().cpu_group) if get_parallel().tp_size > 1 else None
    policy = spec_controller.make_policy(options, own, broadcast)
    controller = SpecController(policy)
    spec_controller.controllers[self] = controller
    _reserved = allocation_sizing.get_alloc_len_per_decode()
    if all(arm.topk <= 1 for arm in (own, *policy.arms)):
        self.adaptive_controller = AdaptiveController(self, None)  # before 0.5.20 it takes no policy
        self.adaptive_controller.params = BanditStepsPolicy(controller)
        result = original(self, *args, **kwargs)
    else:
        result = original(self, *args, **kwargs)
        with _draft_contexts(self):
            _trees[self] = TreeSwitcher(self, controller, own)
    return result


def _check(arms: tuple[Arm, ...]) -> None:
    from sglang.srt.runtime_context import get_schedule, get_spec

    def refuse(problem: str, advice: str) -> None:
        raise PatchError(problem, **patches.at(init_cuda_graphs), advice=advice)

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


@patches.wrap(
    f"{WORKER}.activate_step_by_batch",
    relies_on="self.adaptive_controller",
    when="called=eagle.sglang.verify",
    why=_WHY,
)
def activate_step_by_batch(original, self, batch_size: int):
    """Switch to the bandit's arm before each decode batch."""
    trees = _trees.get(self)
    if trees is None:
        return original(self, batch_size)
    trees.activate(batch_size)
    return None


@patches.wrap(f"{WORKER}.on_verify_complete_cpu", when="called=eagle.sglang.verify", why=_WHY)
def on_verify_complete_cpu(original, self, num_correct_drafts_per_req: list[int], batch_size: int = 0):
    """Reward the arm with tokens per second once the accepted counts are on the host."""
    trees = _trees.get(self)
    if trees is not None:
        trees.controller.step_finished(num_correct_drafts_per_req, batch_size)
    original(self, num_correct_drafts_per_req, batch_size)  # here SGLang's adaptive controller learns
    drafter_refit.observe(self, history_drafts.batch_verified(self, num_correct_drafts_per_req))


@patches.wrap(
    f"{_DRAFTER}.draft",
    relies_on="self.topk",
    when="called=eagle.sglang.verify",
    why="The step before has proposed for the largest top-k; and earlier answers may be better drafts.",
)
def draft(original, self, batch: Any, *args: Any, **kwargs: Any):
    """Take the first proposals, which are the likeliest; with the option history, drafts from earlier answers."""
    kept = batch.spec_info
    if kept is not None and kept.topk_p is not None and kept.topk_p.shape[1] > self.topk:
        kept.topk_p, kept.topk_index = kept.topk_p[:, : self.topk], kept.topk_index[:, : self.topk]
    verify_input = original(self, batch, *args, **kwargs)
    history_drafts.replace_chains(self, batch, verify_input)
    return verify_input


@patches.wrap(
    f"{_DRAFTER}._draft_extend_for_decode",
    relies_on="self.topk",
    params="batch",
    id="eagle.sglang.draft_extend_for_decode",
    when="called=eagle.sglang.verify",
    why="Proposals are made before the arm that will use them is chosen.",
)
@patches.wrap(
    f"{_DRAFTER}._draft_extend_for_prefill",
    relies_on="self.topk",
    params="batch",
    why="Proposals are made before the arm that will use them is chosen.",
)
def draft_extend_for_prefill(original, self, *args: Any, **kwargs: Any):
    """Propose as many as the largest arm takes."""
    trees = next((t for worker, t in _trees.items() if worker._draft_worker is self), None)
    if trees is None:
        return original(self, *args, **kwargs)
    with having(self, "topk", trees.own.topk):
        return original(self, *args, **kwargs)


@patches.wrap(
    "sglang.srt.mem_cache.allocation_sizing:get_alloc_len_per_decode",
    relies_on=("spec_steps", "spec_topk"),
    why="Slots are reserved for the configuration that runs now; the next may need more.",
)
def get_alloc_len_per_decode(original, *args: Any):
    """Reserve what the engine's own, largest configuration needs."""
    return max(original(*args), _reserved)


def _current_state(worker: Any) -> Any:
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
        get_context().override(patches.of(init_cuda_graphs).id, speculative_eagle_topk=topk)


@contextmanager
def _topk(worker: Any, topk: int) -> Iterator[None]:
    """Set another top-k while a state is built. SGLang restores steps and tokens before top-k, and would refuse."""
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
    """Return ``draft_tp_context`` as SGLang enters it; it asks for something else before 0.5.21, in 0.5.21, 0.5.22 and 0.5.23."""
    from sglang.srt.speculative.spec_utils import draft_tp_context

    if hasattr(drafter, "parallel_layout"):
        return draft_tp_context(drafter.parallel_layout)
    if not hasattr(drafter, "draft_owns_attention"):
        return drafter.draft_tp_context(drafter.draft_runner.tp_group)
    owns_attention = drafter.draft_owns_attention
    if hasattr(drafter, "draft_tp_context"):
        return drafter.draft_tp_context(drafter.draft_runner.tp_group, owns_attention=owns_attention)
    return draft_tp_context(owns_attention)
