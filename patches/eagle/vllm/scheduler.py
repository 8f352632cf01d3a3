"""Let vLLM's scheduler tell workers which tokens finished requests kept, and have the bandit choose the drafts of each step.

A worker does not know those tokens: it sees tokens behind a stop that the scheduler cuts off, and with asynchronous scheduling
it holds placeholders. The bandit is in `spec_controller`, drafts from history are in `history_drafts`."""

from __future__ import annotations

import weakref
from typing import Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.options import UNTIL_VLLM
from flashpatch.patches.eagle.vllm import history_drafts
from flashpatch.patches.eagle.vllm.spec_controller import (
    BanditLookup,
    SpecController,
    arms_schedule,
    controller_of,
    controllers,
    graph_sizes,
    make_policy,
)

FINISHED = "flashpatch_finished"
"""Attribute of a ``SchedulerOutput``: request id to (tokens, prompt length), or None for a prompt of embeddings."""
STARTED = "flashpatch_started"
"""Attribute of a ``SchedulerOutput``: when scheduling of the step started."""

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_OUTPUT, _REQUEST = "vllm.v1.core.sched.output:SchedulerOutput", "vllm.v1.request:Request"
_CONFIG = "vllm.config.speculative:SpeculativeConfig"
_WHY = (
    "vLLM's number of speculative tokens is fixed, or a table by batch size that does not follow acceptance."
)

_finished: weakref.WeakKeyDictionary[Any, dict[str, tuple[list[int], int] | None]] = (
    weakref.WeakKeyDictionary()
)

patches = Patches("eagle", "vllm>=0.24", remove_when=UNTIL_VLLM)


@patches.wrap(
    f"{_SCHEDULER}._free_request",
    relies_on=(
        "self.finished_req_ids.add",
        f"{_REQUEST}.num_prompt_tokens",
        f"{_REQUEST}.all_token_ids",
        f"{_REQUEST}.prompt_token_ids",
    ),
    scope="engine-core",
    evidence="optional",
    why="Only the scheduler knows which tokens a finished request kept.",
)
def free_request(original, self, request: Any, *args: Any, **kwargs: Any):
    """Note tokens and prompt length of each request as it is freed."""
    embedded = request.prompt_token_ids is None
    tokens = None if embedded else (list(request.all_token_ids), request.num_prompt_tokens)
    _finished.setdefault(self, {})[request.request_id] = tokens
    return original(self, request, *args, **kwargs)


@patches.wrap(
    f"{_SCHEDULER}.schedule",
    relies_on=(
        "self.dynamic_sd_lookup",
        "self.running",
        "request.spec_token_ids",
        f"{_OUTPUT}.finished_req_ids",
        f"{_OUTPUT}.num_spec_tokens_to_schedule",
        f"{_OUTPUT}.total_num_scheduled_tokens",
        f"{_REQUEST}.num_computed_tokens",
        f"{_REQUEST}.num_prompt_tokens",
    ),
    scope="engine-core",
    why="The captured states are in the workers, which may be other processes, and a step's time starts here.",
)
def schedule(original, self, *args: Any, **kwargs: Any):
    """Add the final tokens of finished requests, and the time, to the scheduler's output. Drop drafts beyond the number
    that was scheduled, of which vLLM 0.31's second model runner makes the maximum at every step."""
    history = history_drafts.history_of(self)
    if history is not None:
        history.step_started()
    controller = controller_of(self)
    started = None
    if controller is not None:
        started = controller.step_started(self.running)
        if history is None:  # whose drafts are as long as they should be
            controller.drop_unasked_drafts(self.running)
    scheduler_output = original(self, *args, **kwargs)
    if controller is not None:
        setattr(scheduler_output, STARTED, started)
        controller.step_scheduled(scheduler_output)
    finished = _finished.get(self)
    if finished:
        tokens = {name: finished.pop(name, None) for name in scheduler_output.finished_req_ids}
        setattr(scheduler_output, FINISHED, tokens)
    return scheduler_output


@patches.wrap(
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
    relies_on=(
        f"{_CONFIG}.num_speculative_tokens_per_batch_size",
        f"{_CONFIG}.use_eagle",
        f"{_CONFIG}.uses_draft_model",
        f"{_CONFIG}.use_dflash",
        f"{_CONFIG}.target_parallel_config",
        "vllm.config.parallel:ParallelConfig.data_parallel_size",
        "vllm.v1.spec_decode.dynamic.utils:build_dynamic_sd_schedule_lookup",
    ),
    scope="driver",
    evidence="optional",
    when="child=engine-core",
    why=_WHY,
)
def create_speculative_config(original, self, *args: Any, **kwargs: Any):
    """Open vLLM's dynamic speculation with a schedule that names every arm.

    Not if the user opened it. For drafts from history speculation itself is opened. Under data parallelism, whose ranks must
    take steps alike, it stays static: vLLM 0.26 and newer turn the schedule off again, older ones would hang."""
    options = engine.options("eagle")
    history_drafts.open_speculation(self, options)
    config = original(self, *args, **kwargs)
    if config is not None and options["adapt"] and not config.num_speculative_tokens_per_batch_size:
        if _may_change(config):  # raises before the engine starts
            config.num_speculative_tokens_per_batch_size = arms_schedule(
                make_policy(options, config.num_speculative_tokens)
            )
    return config


def _may_change(config: Any) -> bool:
    """Whether vLLM can draft another number of tokens at each step, for a ``SpeculativeConfig``."""
    if config.target_parallel_config.data_parallel_size > 1:
        return False
    method = config.method == "ngram" or config.use_eagle() or config.uses_draft_model()
    return bool(method) and not config.use_dflash() and not getattr(config, "parallel_drafting", False)


@patches.wrap(
    "vllm.config.vllm:VllmConfig._maybe_override_dynamic_sd_cudagraph_mode",
    relies_on=(
        "self.speculative_config",
        "self.compilation_config.cudagraph_mode.has_full_cudagraphs",
        "vllm.config.compilation:CompilationConfig.cudagraph_capture_sizes",
        "vllm.config.compilation:CompilationConfig.max_cudagraph_capture_size",
        "vllm.config.scheduler:SchedulerConfig.max_num_seqs",
        "vllm.config.vllm:VllmConfig.use_v2_model_runner",
        "vllm.platforms.interface:Platform.is_cpu",
    ),
    scope="driver",
    evidence="optional",
    why="vLLM's first model runner has no full CUDA graphs for a number of drafts that changes, which costs more than the "
    "bandit gains.",
)
def maybe_override_dynamic_sd_cudagraph_mode(original, self, *args: Any, **kwargs: Any):
    """Take the schedule back where it would cost full CUDA graphs, unless the user names arms: then the number of drafts
    stays, and acceptance is followed. Elsewhere give vLLM sizes of graphs that the arms share."""
    from vllm.platforms import current_platform

    config, options, graphs = self.speculative_config, engine.options("eagle"), self.compilation_config
    full = graphs.cudagraph_mode.has_full_cudagraphs() and not current_platform.is_cpu()
    if config is not None and options["adapt"] and not options["arms"] and full:
        drafts = config.num_speculative_tokens
        ours = arms_schedule(make_policy(options, drafts))
        if config.num_speculative_tokens_per_batch_size == ours and not self.use_v2_model_runner:
            config.num_speculative_tokens_per_batch_size = None
        elif config.num_speculative_tokens_per_batch_size == ours and not (
            graphs.cudagraph_capture_sizes
            or graphs.max_cudagraph_capture_size
            or getattr(self, "performance_mode", "") == "interactivity"
        ):
            most = min(2 * self.scheduler_config.max_num_seqs * (drafts + 1), 512)  # as vLLM's own
            graphs.cudagraph_capture_sizes = graph_sizes(drafts, most)
    return original(self, *args, **kwargs)


def _restore_lookups(site: Site) -> None:
    """Restore the look-up table that vLLM's own code would have made, in every scheduler."""
    for scheduler, controller in list(controllers.items()):
        if scheduler.dynamic_sd_lookup is not None:
            most = scheduler.scheduler_config.max_num_seqs
            scheduler.dynamic_sd_lookup = [controller.max_drafts] * (most + 1)
    controllers.clear()
    site.unwrap()


@patches.wrap(
    f"{_SCHEDULER}.__init__",
    relies_on=("self.dynamic_sd_lookup", "self.num_spec_tokens"),
    scope="engine-core",
    evidence="install",
    why=_WHY,
    undo=_restore_lookups,
)
def scheduler_init(original, self, *args: Any, **kwargs: Any):
    """Put an object that asks the bandit in the place of the look-up table."""
    original(self, *args, **kwargs)
    ledger.role("engine-core")
    history_drafts.attach(self)
    config, options = self.vllm_config.speculative_config, engine.options("eagle")
    if config is None or not options["adapt"]:
        return ledger.note(eagle_bandit_off="the engine does not speculate") if options["adapt"] else None
    most, schedule = self.num_spec_tokens, config.num_speculative_tokens_per_batch_size
    policy = make_policy(options, most)
    fixed = schedule is None and _may_change(config)
    if fixed:
        ledger.note(
            eagle_bandit_off="full CUDA graphs of vLLM's first model runner; name eagle's arms to have it"
        )
        policy = make_policy({**options, "arms": [Arm(most, 1, most + 1)]}, most)
    elif schedule != arms_schedule(policy):
        named = "a schedule of the user's own" if schedule else f"method {config.method}, or data parallelism"
        return ledger.note(eagle_bandit_off=named)
    controller = SpecController(policy, most)
    controllers[self] = controller
    if not fixed:
        self.dynamic_sd_lookup = BanditLookup(controller)
    controller.note()


@patches.wrap(
    f"{_SCHEDULER}.update_from_output",
    relies_on=(
        "model_runner_output.sampled_token_ids",
        "self.make_spec_decoding_stats",
        f"{_OUTPUT}.scheduled_spec_decode_tokens",
        f"{_OUTPUT}.num_spec_tokens_to_schedule",
    ),
    scope="engine-core",
    why="The reward of an arm is the tokens of its steps over their seconds.",
)
def update_from_output(
    original, self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
):
    """Count the tokens of each step and its wall time."""
    requests = {}
    if history_drafts.history_of(self) is not None:  # finished requests are gone afterwards
        running = ((name, self.requests.get(name)) for name in scheduler_output.num_scheduled_tokens)
        requests = {name: one for name, one in running if one is not None}  # None: aborted meanwhile
    result = original(self, scheduler_output, model_runner_output, *args, **kwargs)
    ours = history_drafts.step_finished(self, scheduler_output, model_runner_output, requests)
    controller = controller_of(self)
    if controller is not None:
        started = getattr(scheduler_output, STARTED, None)
        if started is not None:
            controller.step_finished(started, scheduler_output, model_runner_output, ours)
    return result
