"""Let SGLang verify drafts from history: its worker knows every request's tokens when it drafts for the next step.

An engine without speculation is opened with SGLang's n-gram worker. There, and beside an EAGLE drafter that drafts
chains, history replaces the drafts of those requests for which more of its own tokens are expected to be accepted. A step
verifies the same number of tokens whatever is drafted, so drafts are as long as it has room for. Verification is SGLang's
own and asks only the target, so the answers are distributed as the target's. Nothing here depends on time, so that the
ranks of an engine draft alike."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.patches._shared.context import having
from flashpatch.patches.eagle.history.drafts import MAX_DRAFTS, Text
from flashpatch.patches.eagle.history.engine_history import EngineHistory, say_off
from flashpatch.patches.eagle.history.history_file import HistoryFile
from flashpatch.patches.eagle.options import SGLANG, UNTIL_SGLANG

_BESIDE = ("EAGLE", "EAGLE3", "NGRAM")  # speculative algorithms whose drafts are replaced

patches = Patches(
    "eagle",
    SGLANG,
    scope="worker",
    evidence="optional",
    why="What a policy generated before, for the same prompt above all, is the cheapest drafter.",
    remove_when=UNTIL_SGLANG,
)


class WorkerHistory(EngineHistory):
    """Feed the requests of one worker's decode batches to `HistoryDrafts`.

    Attributes:
        rows: requests of the last batch whose drafts are from history, by their place in it.
        steps: batches that were verified since the last call of `propose`."""

    def __init__(self, capacity: int, file: HistoryFile | None = None) -> None:
        super().__init__(capacity, file)
        self.rows: set[int] = set()
        self.steps = 1
        self._last: list[Any] = []  # requests of the last batch; those that are over have tokens not yet seen

    def propose(self, requests: Sequence[Any], room: int) -> list[list[int] | None]:
        """Take up the new tokens of the last batch, and return draft tokens for the next.

        Args:
            requests: SGLang's ``Req`` of the batch.
            room: draft tokens per request.

        Returns:
            At most ``room`` tokens per request; None if the worker's own drafts are better."""
        outcomes: dict[Text, int] = {}
        for row, request in enumerate(self._last):
            text, accepted = self.texts[request], self._take(request) - 1
            if self.steps == 1 and accepted >= 0:
                if row in self.rows:
                    outcomes[text] = min(accepted, len(text.draft.guesses) if text.draft else 0)
                else:
                    self.drafts.learn_rival(room, min(accepted, room))
        self.drafts.learn(outcomes, len(requests), 0, None)
        for request in requests:
            if request not in self.texts:
                self._take(request)
        self._last, self.steps = list(requests), 0
        each = [room] * len(requests)
        found = self.drafts.propose([self.texts[request] for request in requests], each, each, free=True)
        self.rows = {row for row, draft in enumerate(found) if draft}
        self.note_if_due()
        return found

    def _take(self, request: Any) -> int:
        prompt = request.origin_input_ids
        return self.take_tokens(request, prompt, request.output_ids, len(prompt))


_histories: weakref.WeakKeyDictionary[Any, WorkerHistory | None] = weakref.WeakKeyDictionary()


def _history_of(drafter: Any, reason: str) -> WorkerHistory | None:
    """Return the history of a worker, made at its first batch; None if the option is off or for this reason."""
    if drafter not in _histories:
        options = engine.options("eagle")
        if options["history"] and reason:
            say_off(reason)
        drafts = options["history"] and not reason
        _histories[drafter] = WorkerHistory(options["history_tokens"], _file(drafter)) if drafts else None
    return _histories[drafter]


def _file(drafter: Any) -> HistoryFile | None:
    """Return where answers are kept: nowhere with tensor parallelism, whose ranks must draft alike and may not see one file."""
    from sglang.srt.runtime_context import get_parallel

    options = engine.options("eagle")
    if not options["history_folder"] or get_parallel().tp_size > 1:
        return None
    vocabulary = drafter.target_worker.model_config.vocab_size
    return HistoryFile(options["history_folder"], options["history_tokens"], vocabulary)


def _propose(
    drafter: Any, history: WorkerHistory, requests: Sequence[Any], room: int
) -> list[list[int] | None]:
    from sglang.srt.runtime_context import get_parallel

    try:
        return history.propose(requests, room)
    except Exception as error:
        if get_parallel().tp_size > 1:  # ranks must not verify different drafts
            raise
        _histories[drafter] = None  # no answer needs them
        say_off(f"{type(error).__name__}: {error}")
        return [None] * len(requests)


def replace_chains(drafter: Any, batch: Any, verify_input: Any) -> None:
    """Put drafts from history in the place of an EAGLE drafter's.

    Args:
        drafter: ``EagleDraftWorker``.
        batch: the ``ScheduleBatch``.
        verify_input: what ``draft`` returned; ``draft_token`` [requests * draft_token_num] is written."""
    history = _history_of(drafter, _unsuited(drafter, verify_input))
    if history is None or not batch.reqs or batch.forward_mode.is_idle():
        return
    import torch

    width = verify_input.draft_token_num
    tokens = verify_input.draft_token.view(-1, width)
    for row, draft in enumerate(_propose(drafter, history, batch.reqs, width - 1)):
        if draft:
            tokens[row, 1 : 1 + len(draft)] = torch.tensor(draft, dtype=tokens.dtype, device=tokens.device)


def _unsuited(drafter: Any, verify_input: Any) -> str:
    """Say why an EAGLE drafter's drafts cannot be replaced; "" if they can."""
    from sglang.srt.runtime_context import get_schedule

    if isinstance(verify_input, tuple):
        return "pipeline parallelism"
    if not get_schedule().disable_overlap_schedule:
        return "overlap scheduling"
    if drafter.topk > 1:
        return "the drafter drafts trees"
    if getattr(verify_input, "draft_probs", None) is not None:
        return "rejection sampling, whose probabilities belong to the drafter's tokens"
    return ""


def batch_verified(worker: Any, accepted: list[int]) -> list[int]:
    """Count a batch that an EAGLE worker verified; return the counts of the requests with its drafter's own drafts."""
    history = _histories.get(worker._draft_worker)
    if history is None:
        return accepted
    history.steps += 1
    if history.steps > 1:  # nothing was drafted for it
        return accepted
    return [count for row, count in enumerate(accepted) if row not in history.rows]


def _forget(site: Site) -> None:
    _histories.clear()
    site.unwrap()


@patches.wrap(
    "sglang.srt.speculative.ngram_worker:NGRAMWorker._prepare_draft_tokens",
    relies_on=(
        "self.draft_token_num",
        "self.enable_overlap",
        "self.ngram_corpus.batch_get",
        "req.output_ids",
    ),
    upstream="The n-gram worker's trie: matches over all texts alike, without the prompt they belong to.",
    undo=_forget,
)
def prepare_draft_tokens(original, self, batch: Any):
    """Draft continuations of earlier answers, those to the same prompt first, if more of them are accepted."""
    drafts, mask = original(self, batch)
    history = _history_of(self, "overlap scheduling" if self.enable_overlap else "")
    if history is None:
        return drafts, mask
    import numpy as np
    from sglang.srt.runtime_context import get_parallel

    ledger.role("worker", tp=get_parallel().tp_rank)
    width = self.draft_token_num
    drafts, mask = np.array(drafts), np.array(mask)
    rows, trees = drafts.reshape(-1, width), mask.reshape(-1, width, width)
    history.steps = 1  # every decode batch is drafted for
    for row, draft in enumerate(_propose(self, history, batch.reqs, width - 1)):
        if draft:
            rows[row, 1:] = [*draft, *[0] * (width - 1 - len(draft))]
            trees[row] = np.tri(width, dtype=trees.dtype)
    return drafts, mask


# where SGLang takes its verification from, the last two before 0.5.23, at the call: an accelerator's and a CPU's
_VERIFIES = "sglang.srt.speculative.eagle_utils", "sglang.kernels.ops.speculative.sampling", "sgl_kernel"


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@patches.wrap(
    "sglang.srt.speculative.eagle_utils:eagle_sample",
    relies_on=(
        "batch.sampling_info",
        "tree_speculative_sampling_target_only",
        "target_probs",
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.need_min_p_sampling",
    ),
)
def eagle_sample(original, verify_input: Any, batch: Any, *args: Any, **kwargs: Any):
    """Where history drafts, verify against the distribution that min_p leaves, as SGLang's sampler draws: its verification
    knows the other filters alone."""
    info, name = batch.sampling_info, "tree_speculative_sampling_target_only"
    if batch.forward_mode.is_idle() or not (info.need_min_p_sampling and engine.options("eagle")["history"]):
        return original(verify_input, batch, *args, **kwargs)
    places = [one for one in map(_imported, _VERIFIES) if hasattr(one, name)]
    verify = getattr(places[0], name)

    def above_min_p(*, target_probs: Any, **more: Any) -> None:
        least = target_probs.amax(-1, keepdim=True) * info.min_ps.view(-1, 1, 1)
        kept = target_probs.masked_fill(target_probs < least, 0.0)
        verify(target_probs=kept / kept.sum(-1, keepdim=True), **more)

    with ExitStack() as held:
        for place in places:
            held.enter_context(having(place, name, above_min_p))
        return original(verify_input, batch, *args, **kwargs)


@patches.wrap(
    "sglang.srt.arg_groups.pipeline:run_resolution_pipeline",
    "sglang.srt.server_args:ServerArgs.__post_init__",  # before 0.5.19
    since={"0.5.19": ("sglang.srt.arg_groups.overrides:declare_resolution",)},
    params=(),
)
def run_resolution_pipeline(original, server_args: Any):
    """Open SGLang's n-gram speculation if the option history is on and nothing else speculates."""
    options = engine.options("eagle")
    asked = (server_args.speculative_algorithm or "").upper()
    if options["history"] and not asked and server_args.enable_custom_logit_processor:
        say_off("custom logit processors, which SGLang does not apply beside speculation")
    elif options["history"] and (not asked or asked in _BESIDE):
        fields: dict[str, Any] = {"disable_overlap_schedule": True}  # else tokens come too late to draft from
        if not asked:
            fields |= {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": MAX_DRAFTS + 1,
                "speculative_ngram_max_bfs_breadth": 1,
            }
        if hasattr(server_args, "resolve_once"):  # they keep what the user gave
            from sglang.srt.arg_groups.overrides import declare_resolution

            declare_resolution(server_args, patches.of(run_resolution_pipeline).id, **fields)
        else:
            vars(server_args).update(fields)
    elif options["history"]:
        say_off(f"SGLang's speculative_algorithm={asked}")
    elif options["history_folder"]:
        say_off("history_folder is set, and history is not")
    return original(server_args)
