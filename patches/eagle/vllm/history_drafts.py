"""Let vLLM verify drafts from history: its scheduler knows every request's tokens, and proposes for the next step.

An engine without a drafter is opened with one that proposes nothing. Beside another drafter, history replaces its drafts
for those requests for which more of its own tokens are expected to be accepted. Verification is vLLM's own: each draft
token counts as certain, as those of its n-gram method do, so the answers are distributed as the target's."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any

from flashpatch import engine
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import having
from flashpatch.patches.eagle.history.drafts import MAX_DRAFTS, Text
from flashpatch.patches.eagle.history.engine_history import EngineHistory, say_off
from flashpatch.patches.eagle.history.history_file import HistoryFile
from flashpatch.patches.eagle.options import UNTIL_VLLM


class NoDrafter:
    """Propose nothing: a drafter in vLLM's sense for engines whose drafts come from the scheduler."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Return no draft for each request."""
        return [[] for _ in sampled_token_ids]


def open_speculation(arguments: Any, options: Mapping[str, Any]) -> None:
    """Before ``EngineArgs.create_speculative_config``: let an engine verify drafts that its scheduler proposes. Raises
    PatchError if the user asked for asynchronous scheduling, whose drafts never reach the scheduler."""
    if not options["history"]:
        return
    from vllm.v1.sample.logits_processor import _load_custom_logitsprocs

    if not arguments.speculative_config and _load_custom_logitsprocs(arguments.logits_processors):
        say_off("custom logits processors, which vLLM drops or refuses beside speculation")
        return
    if arguments.async_scheduling:
        raise PatchError(
            "drafts from history cannot be used with async_scheduling=True: the scheduler does not see tokens in time.",
            patch=Patches.of(update_draft_token_ids).id,
            target="vllm.engine.arg_utils:EngineArgs",
            advice="Leave async_scheduling away, or set eagle's option history to false.",
        )
    arguments.async_scheduling = False
    if not arguments.speculative_config:
        arguments.speculative_config = {
            "method": "custom_class",
            "model": f"{__name__}.{NoDrafter.__name__}",
            "num_speculative_tokens": MAX_DRAFTS,
        }


def _is_ours(speculative: Any) -> bool:
    """Whether a ``SpeculativeConfig`` was opened by `open_speculation`, for drafts from history alone."""
    return speculative is not None and speculative.model == f"{__name__}.{NoDrafter.__name__}"


class SchedulerHistory(EngineHistory):
    """Feed one scheduler's requests to `HistoryDrafts`, and its drafts to the scheduler."""

    _started = 0.0

    def step_started(self) -> None:
        """Note when scheduling of a step started."""
        self._started = time.perf_counter()

    def step_finished(self, scheduled: Any, output: Any, requests: Mapping[str, Any]) -> set[str]:
        """Take up the new tokens, learn from the drafts; return the requests that verified drafts from history.

        Args:
            scheduled, output: the step's ``SchedulerOutput`` and ``ModelRunnerOutput``.
            requests: the step's requests by name, with their new tokens."""
        now = time.perf_counter()
        verified, lengths = scheduled.scheduled_spec_decode_tokens, scheduled.num_scheduled_tokens
        outcomes: dict[Text, int] = {}
        ours = set()
        for name, request in requests.items():
            text = self.texts.get(request)
            sampled = (
                output.sampled_token_ids[output.req_id_to_index[name]] if output.sampled_token_ids else ()
            )
            drafted = len(verified.get(name, ()))
            if text is not None and text.draft is not None:
                ours.add(name)
                if drafted == len(text.draft.guesses) and sampled:
                    outcomes[text] = len(sampled) - 1
            elif drafted and sampled:
                self.drafts.learn_rival(drafted, len(sampled) - 1)
        decodes_only = all(length == 1 + len(verified.get(name, ())) for name, length in lengths.items())
        seconds = now - self._started if decodes_only and self._started else None
        self.drafts.learn(outcomes, len(lengths), sum(map(len, verified.values())), seconds)
        for request in requests.values():
            if request.prompt_token_ids:  # prompts may be given as embeddings
                self.take_tokens(request, request.prompt_token_ids, request.all_token_ids)
        self.note_if_due()
        return ours

    def propose(self, scheduler: Any, names: list[str]) -> dict[str, list[int]]:
        """Return drafts for the next step, of those of the scheduler's requests for which there is one better than theirs."""
        requests, texts = [], []
        for name in names:
            request = scheduler.requests.get(name)
            text = self.texts.get(request) if request is not None else None
            if text is None or request.is_finished() or request.is_prefill_chunk:
                continue
            # vLLM's verification knows neither, and draws other random numbers than its sampler, so that no seed repeats an answer.
            sampling = request.sampling_params
            if not (sampling.min_p or sampling.logit_bias or sampling.seed is not None):
                requests.append(request)
                texts.append(text)
        most = scheduler.num_spec_tokens
        room = [
            min(most, (request.max_tokens or most) - request.num_output_tokens - 1) for request in requests
        ]
        drafts = self.drafts.propose(texts, room, [len(request.spec_token_ids) for request in requests])
        return {
            one.request_id: draft for one, draft in zip(requests, drafts, strict=True) if draft is not None
        }


_histories: weakref.WeakKeyDictionary[Any, SchedulerHistory] = weakref.WeakKeyDictionary()


def history_of(scheduler: Any) -> SchedulerHistory | None:
    """Return the scheduler's history; None if it drafts nothing from it."""
    return _histories.get(scheduler)


def step_finished(scheduler: Any, scheduled: Any, output: Any, requests: Mapping[str, Any]) -> set[str]:
    """Call `SchedulerHistory.step_finished`, if the scheduler has a history; see there."""
    history = _histories.get(scheduler)
    if history is not None:
        try:
            return history.step_finished(scheduled, output, requests)
        except Exception as error:
            _turn_off(scheduler, error)
    return set()


def _turn_off(scheduler: Any, error: Exception) -> None:
    """Go on without drafts from history, which no answer needs."""
    _histories.pop(scheduler, None)
    say_off(f"{type(error).__name__}: {error}", error)


def attach(scheduler: Any) -> None:
    """Give a new scheduler a history, if the option is on and its engine can use one."""
    options = engine.options("eagle")
    if not options["history"]:
        return say_off("history_folder is set, and history is not") if options["history_folder"] else None
    if reason := _unsuited(scheduler.vllm_config):
        say_off(reason)
    else:
        config, folder, file = scheduler.vllm_config, options["history_folder"], None
        if folder:
            rank = config.parallel_config.data_parallel_rank
            vocabulary = config.model_config.get_vocab_size()
            file = HistoryFile(folder, options["history_tokens"], vocabulary, rank)
        _histories[scheduler] = SchedulerHistory(options["history_tokens"], file)


def _unsuited(config: Any) -> str:
    """Say why an engine cannot verify drafts from its scheduler; "" if it can."""
    speculative = config.speculative_config
    if speculative is None:
        return "the engine was opened without speculation"
    if config.use_v2_model_runner:
        return "vLLM's second model runner takes drafts from its own drafter only; set VLLM_USE_V2_MODEL_RUNNER=0"
    if config.scheduler_config.async_scheduling:
        return "asynchronous scheduling"
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism, whose steps overlap"
    if speculative.draft_sample_method != "greedy":
        return f"draft_sample_method={speculative.draft_sample_method}, whose probabilities belong to the drafter's tokens"
    return ""


patches = Patches("eagle", "vllm>=0.24", evidence="optional", remove_when=UNTIL_VLLM)


@patches.wrap(
    "vllm.sampling_params:SamplingParams._validate_spec_decode",
    relies_on=("self.min_p", "self.logit_bias", "vllm.sampling_params:SamplingParams.seed"),
    params="speculative_config",
    scope="driver",
    why="vLLM refuses min_p and logit_bias where it speculates; an engine that it was opened for history must not.",
)
def validate_spec_decode(original, self, speculative_config: Any, *args: Any, **kwargs: Any):
    """Take requests that speculation cannot serve where nothing but history drafts: they go undrafted."""
    if not _is_ours(speculative_config):
        original(self, speculative_config, *args, **kwargs)


@patches.wrap(
    "vllm.v1.sample.logits_processor:build_logitsprocs",
    relies_on="vllm_config.speculative_config",
    params="vllm_config",
    scope="worker",
    why="vLLM makes no logits processor for min_p and logit_bias where it speculates.",
)
def build_logitsprocs(original, vllm_config: Any, *args: Any, **kwargs: Any):
    """Make all logits processors where nothing but history drafts; requests that need them go undrafted."""
    if not _is_ours(vllm_config.speculative_config):
        return original(vllm_config, *args, **kwargs)
    with having(vllm_config, "speculative_config", None):
        return original(vllm_config, *args, **kwargs)


def _forget(site: Site) -> None:
    _histories.clear()
    site.unwrap()


@Patches("eagle", "vllm>=0.24", scope="engine-core", remove_when=UNTIL_VLLM).wrap(
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
    relies_on=(
        "draft_token_ids.req_ids",
        "request.spec_token_ids",
        "request.is_prefill_chunk",
        "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer",
        "vllm.v1.request:Request.all_token_ids",
        "vllm.v1.outputs:DraftTokenIds",
    ),
    evidence="optional",
    why="What a policy generated before, for the same prompt above all, is the cheapest drafter, and vLLM forgets it.",
    undo=_forget,
)
def update_draft_token_ids(original, self, draft_token_ids: Any, *args: Any, **kwargs: Any):
    """Propose continuations of earlier answers to the scheduler, as many as raise the step's tokens per second.

    vLLM takes them up as it takes a drafter's, and so drops what a grammar does not allow."""
    result = original(self, draft_token_ids, *args, **kwargs)
    history = _histories.get(self)
    if history is not None:
        try:
            drafts = history.propose(self, draft_token_ids.req_ids)
            if drafts:
                original(self, type(draft_token_ids)(list(drafts), list(drafts.values())), *args, **kwargs)
        except Exception as error:
            _turn_off(self, error)
    return result
