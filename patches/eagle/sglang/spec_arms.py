"""The speculative configuration of each decode batch, chosen by the bandit.

Where every arm is a chain (top-k 1) SGLang's own adaptive controller does the switching, with our policy in it.
Trees it does not know; for these the same runtime states are built and applied here, and two things are kept at
the engine's own, largest top-k: what the drafter proposes for the next step, whatever arm that will run, and the
cache slots reserved for a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.errors import PatchError
from flashpatch.patches.eagle.bandit.arm import Arm, parse_arms
from flashpatch.patches.eagle.bandit.policy import Policy
from flashpatch.patches.eagle.sglang.spec_controller import Chains, Chooser
from flashpatch.patches.eagle.sglang.targets import DRAFTER, TEXT, WORKER
from flashpatch.record import Contract, Patch


class Trees:
    """Switches between configurations with several top-k."""

    def __init__(self, worker: Any, chooser: Chooser, home: Arm) -> None:
        self.chooser, self.home = chooser, home
        self._worker = weakref.ref(worker)
        self.states = {home: _state_now(worker)}
        for arm in (*chooser.policy.arms, Arm.DISABLE):
            if arm not in self.states:
                with _topk(worker, _topk_of(arm)):
                    steps, tokens = (arm.steps, arm.draft_tokens) if arm != Arm.DISABLE else (0, 1)
                    self.states[arm] = worker.build_adaptive_runtime_state(steps, tokens, None)

    def activate(self, batch_size: int) -> None:
        """Before a decode batch."""
        worker, arm = self._worker(), self.chooser.choose(batch_size)
        state = self.states[arm]
        _set_topk(worker, _topk_of(arm))
        if (worker.speculative_num_steps, worker.speculative_num_draft_tokens) != (
            state.speculative_num_steps,
            state.speculative_num_draft_tokens,
        ) or worker._draft_worker.draft_attn_backend is not state.draft_attn_backend:
            worker.speculative_num_steps = (
                -1
            )  # states of equal steps differ here, and would be taken as equal
            worker.apply_runtime_state(state)


_trees: weakref.WeakKeyDictionary[Any, Trees] = weakref.WeakKeyDictionary()
_choosers: weakref.WeakKeyDictionary[Any, Chooser] = weakref.WeakKeyDictionary()
_reserved = 0  # slots per request and step that the largest configuration needs


def chooser_of(worker: Any) -> Chooser | None:
    return _choosers.get(worker)


def on_init_graphs(original, self, *args: Any, **kwargs: Any):
    """Around ``EAGLEWorkerV2.init_cuda_graphs``: target and drafter are ready, nothing has run."""
    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.mem_cache import allocation_sizing
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController

    from flashpatch.patches.eagle.bandit.rank_broadcast import Broadcast

    global _reserved
    options = engine.options("eagle")
    if not options["adapt"] or self._draft_worker is None:
        return original(self, *args, **kwargs)
    home = Arm(self.speculative_num_steps, self.topk, self.speculative_num_draft_tokens)
    arms = choose_arms(options["arms"], home)
    _check(self, arms)
    agree = Broadcast(get_tp_group().cpu_group) if get_parallel().tp_size > 1 else None
    policy = Policy(
        arms,
        rule=options["rule"] or None,
        guard=options["guard"],
        window=options["window"],
        seed=options["seed"],
        agree=agree,
    )
    state = Path(options["state"]).expanduser() if options["state"] else None
    chooser = _choosers[self] = Chooser(policy, state=state)
    _reserved = allocation_sizing.get_alloc_len_per_decode()
    if all(arm.topk <= 1 for arm in (home, *arms)):
        self.adaptive_controller = AdaptiveController(self, Chains(chooser))
        result = original(self, *args, **kwargs)
    else:
        result = original(self, *args, **kwargs)
        with _drafting(self):
            _trees[self] = Trees(self, chooser, home)
    ledger.note(eagle_arms=[str(arm) for arm in arms], eagle_rule=policy.rule_name)
    return result


def choose_arms(asked: list[Any], home: Arm) -> tuple[Arm, ...]:
    """The arms of an engine opened as ``home``: those asked for, or that one, shorter ones, and none.

    Raises:
        PatchError: an arm is larger than what the engine has room for.
    """
    if not asked:
        chains = [Arm(steps, 1, steps + 1) for steps in (1, 2, 3, 5, 7) if steps < home.steps]
        arms = (home, *chains) if home.topk > 1 else (home, *(arm for arm in chains if arm != home))
        return (*arms, Arm.DISABLE)
    arms = parse_arms(asked)
    for arm in arms:
        if arm.steps > home.steps or arm.topk > home.topk or arm.draft_tokens > home.draft_tokens:
            raise PatchError(
                f"arm {arm} is larger than the engine's own configuration {home}",
                patch=INIT.id,
                target="arms",
                advice="Open the engine with its largest configuration, or leave this arm out.",
            )
    return arms


def _check(worker: Any, arms: tuple[Arm, ...]) -> None:
    from sglang.srt.runtime_context import get_schedule, get_spec

    def refuse(problem: str, advice: str) -> None:
        raise PatchError(problem, patch=INIT.id, target=INIT.targets[0], advice=advice)

    if get_spec().speculative_adaptive:
        refuse(
            "speculative_adaptive is SGLang's own choice of steps",
            "Leave it out, or set eagle's adapt=false.",
        )
    if any(arm.topk > 1 for arm in arms) and not get_schedule().disable_overlap_schedule:
        refuse(
            "trees cannot be switched under overlap scheduling, where the next step is laid out before this one ends",
            "Open the engine with disable_overlap_schedule, give arms with top-k 1, or set eagle's adapt=false.",
        )


def on_activate(original, self, batch_size: int):
    """Around ``activate_step_by_batch``, called before each decode batch."""
    trees = _trees.get(self)
    if trees is None:
        return original(self, batch_size)
    trees.activate(batch_size)
    return None


def on_complete(original, self, num_correct_drafts_per_req: list[int], batch_size: int = 0):
    """Around ``on_verify_complete_cpu``: the accepted counts of a batch are on the host."""
    trees = _trees.get(self)
    if trees is not None:
        trees.chooser.learn(num_correct_drafts_per_req, batch_size)
    original(
        self, num_correct_drafts_per_req, batch_size
    )  # the controller's turn to learn, where there is one
    _watch(self, num_correct_drafts_per_req)


def _watch(worker: Any, accepted: list[int]) -> None:
    from flashpatch.patches.eagle.sglang import drafter_refit

    drafter_refit.observe(worker, accepted)


def on_draft(original, self, batch: Any, *args: Any, **kwargs: Any):
    """Around ``EagleDraftWorker.draft``: of the proposals kept for it, an arm takes as many as its top-k."""
    kept = batch.spec_info
    if kept is not None and kept.topk_p is not None and kept.topk_p.shape[1] > self.topk:
        kept.topk_p, kept.topk_index = kept.topk_p[:, : self.topk], kept.topk_index[:, : self.topk]
    return original(self, batch, *args, **kwargs)


def on_extend(original, self, *args: Any, **kwargs: Any):
    """Around both draft extends: they propose for the next step, whose arm is not known: as many as any may take."""
    trees = next((t for worker, t in _trees.items() if worker._draft_worker is self), None)
    if trees is None:
        return original(self, *args, **kwargs)
    own, self.topk = self.topk, trees.home.topk
    try:
        return original(self, *args, **kwargs)
    finally:
        self.topk = own


def on_reserve(original):
    """Around ``get_alloc_len_per_decode``: the largest configuration's, whatever runs now."""
    return max(original(), _reserved)


def _state_now(worker: Any) -> Any:
    """The runtime state that the engine was opened with."""
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
    """Build a state for another top-k. SGLang restores steps and tokens before top-k, and would object."""
    own, drafter = worker.topk, worker._draft_worker
    _set_topk(worker, topk)
    vars(drafter)["_rebuild_topk1_chain_buffers"] = lambda: None
    try:
        yield
    finally:
        del vars(drafter)["_rebuild_topk1_chain_buffers"]
        _set_topk(worker, own)


@contextmanager
def _drafting(worker: Any) -> Iterator[None]:
    """The contexts in which SGLang builds its own adaptive states."""
    from sglang.srt.layers.moe.utils import (
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )
    from sglang.srt.speculative.spec_utils import draft_tp_context

    with (
        draft_tp_context(worker._draft_worker.parallel_layout),
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
    ):
        yield


def _undo(site: Site) -> None:
    _trees.clear()
    _choosers.clear()
    site.unwrap()


_WHY = "How much speculation pays depends on the batch and on the drafter, and both change during a rollout."

INIT = Patch(
    id="eagle.sglang.init_cuda_graphs",
    targets=(f"{WORKER}.init_cuda_graphs",),
    wrapper=on_init_graphs,
    undo=_undo,
    contract=Contract(
        mentions=("self.adaptive_controller", "self.adaptive_controller.init_states"),
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
    why=_WHY,
    how="Builds a runtime state per arm; puts the bandit into SGLang's adaptive controller, or beside it for trees.",
    upstream="AdaptiveSpeculativeParams: accepted drafts only, top-k 1 only, and constructed by name.",
    **TEXT,
)

ACTIVATE = Patch(
    id="eagle.sglang.activate_step_by_batch",
    targets=(f"{WORKER}.activate_step_by_batch",),
    wrapper=on_activate,
    contract=Contract(params=("batch_size",), mentions=("self.adaptive_controller",)),
    evidence="optional",
    needs=("eagle.sglang.init_cuda_graphs",),
    why=_WHY,
    how="Switches to the bandit's arm before each decode batch.",
    **TEXT,
)

COMPLETE = Patch(
    id="eagle.sglang.on_verify_complete_cpu",
    targets=(f"{WORKER}.on_verify_complete_cpu",),
    wrapper=on_complete,
    contract=Contract(params=("num_correct_drafts_per_req", "batch_size")),
    evidence="optional",
    needs=("eagle.sglang.init_cuda_graphs",),
    why=_WHY,
    how="Rewards the arm with tokens per second once the accepted counts are on the host.",
    **TEXT,
)

DRAFT = Patch(
    id="eagle.sglang.draft",
    targets=(f"{DRAFTER}.draft",),
    wrapper=on_draft,
    contract=Contract(params=("batch",), mentions=("self.topk",)),
    evidence="optional",
    needs=("eagle.sglang.init_cuda_graphs",),
    why="The step before has proposed for the largest top-k.",
    how="Takes the first proposals, which are the likeliest.",
    **TEXT,
)


def _extend(name: str, method: str) -> Patch:
    return Patch(
        id=f"eagle.sglang.{name}",
        targets=(f"{DRAFTER}.{method}",),
        wrapper=on_extend,
        contract=Contract(params=("batch",), mentions=("self.topk",)),
        evidence="optional",
        needs=("eagle.sglang.draft",),
        why="Proposals are made before the arm that will use them is chosen.",
        how="Proposes as many as the largest arm takes.",
        **TEXT,
    )


RESERVE = Patch(
    id="eagle.sglang.get_alloc_len_per_decode",
    targets=("sglang.srt.mem_cache.allocation_sizing:get_alloc_len_per_decode",),
    wrapper=on_reserve,
    contract=Contract(mentions=("spec_steps", "spec_topk")),
    evidence="optional",
    needs=("eagle.sglang.init_cuda_graphs",),
    why="Slots are reserved for the configuration that runs now; the next may need more.",
    how="Reserves what the engine's own, largest configuration needs.",
    **TEXT,
)

PATCHES = (
    INIT,
    ACTIVATE,
    COMPLETE,
    DRAFT,
    _extend("draft_extend_for_prefill", "_draft_extend_for_prefill"),
    _extend("draft_extend_for_decode", "_draft_extend_for_decode"),
    RESERVE,
)
