"""Capture the target's hidden states where SGLang hands them to its drafter, without a forward of their own.

After a verification the accepted path lies at the front of each request's rows, in trees too, since SGLang
moves it there; row ``j`` holds the state at the ``j``-th accepted input. Rows behind the accepted ones hold
rejected drafts: they are fed again by a later step or lie past the request's end, so that `Recorder` drops them, and
no step waits to learn how many were accepted.

Under EAGLE-3 SGLang hands its drafter inner layers alone, without the last states that training needs: nothing is captured,
and under verl the trainer's pass gives both."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.patches.eagle.options import SGLANG, UNTIL_SGLANG

if TYPE_CHECKING:
    import torch

    from flashpatch.patches.eagle.capture.recorder import Recorder

logger = logging.getLogger("flashpatch.eagle")

WORKER = "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2"
_WHY = (
    "A drafter learns from the target's hidden states, which SGLang computes at every step and throws away."
)

_recorder: Recorder | None = None
_made = False


patches = Patches("eagle", SGLANG, scope="worker", evidence="optional", remove_when=UNTIL_SGLANG)


def recorder_of(worker: Any) -> Recorder | None:
    """Return this process's recorder, made for the first ``worker``; None if another rank captures."""
    global _recorder, _made
    if not _made:
        _made = True
        _recorder = _make(worker)
    return _recorder


def current_recorder() -> Recorder | None:
    """Return this process's recorder; None before the first worker asked for it."""
    return _recorder


def _make(worker: Any) -> Recorder | None:
    from sglang.srt.runtime_context import get_parallel

    from flashpatch.patches.eagle.capture.recorder import make_recorder

    ledger.role("worker", tp=get_parallel().tp_rank)
    if get_parallel().tp_rank != 0:
        return None
    options, algorithm = engine.options("eagle"), worker.speculative_algorithm
    if algorithm.is_eagle() and not algorithm.is_eagle3():
        return make_recorder(options)
    if options["samples"]:
        say_off(algorithm.name)
    return None


@cache
def say_off(name: str) -> None:
    """Say once to who wants samples that none are captured under an algorithm."""
    logger.warning("hidden states are not captured under %s", name)
    ledger.note(eagle_capture_off=f"not under {name}")


def _end_capture(site: Site) -> None:
    global _recorder, _made
    if _recorder is not None:
        _recorder.close()
    _recorder, _made = None, False
    site.unwrap()


@patches.wrap(
    f"{WORKER}.verify",
    relies_on=(
        "run_eagle_verify",
        "sglang.srt.managers.utils:GenerationBatchResult.accept_lens",
        "sglang.srt.speculative.eagle_worker_common:_finalize_accept_tree_path",
        "sglang.srt.runtime_context:get_parallel",
        f"{WORKER}.speculative_num_steps",
    ),
    when="called=eagle.sglang.on_verify_complete_cpu",  # an engine without speculation verifies nothing
    why=_WHY,
    undo=_end_capture,
)
def verify(original, self, batch: Any, *args: Any, **kwargs: Any):
    """Note tokens, positions and states of the accepted path after each verification."""
    recorder = recorder_of(self)
    if recorder is None or batch.forward_mode.is_idle():
        return original(self, batch, *args, **kwargs)
    roots = batch.spec_info.draft_token.view(len(batch.reqs), -1)[:, :1]
    first = batch.seq_lens  # position of each root
    result = original(self, batch, *args, **kwargs)
    hidden = states_of(result)
    if hidden is not None:
        depth = self.speculative_num_steps + 1
        ids, positions, rows = accepted_rows(roots, first, result.next_token_ids, hidden, depth)
        names = [request.rid for request in batch.reqs]
        recorder.step(names, [ids.shape[1]] * len(names), ids.reshape(-1), positions.reshape(-1), rows)
    return result


def accepted_rows(
    roots: torch.Tensor, first: torch.Tensor, after: torch.Tensor, hidden: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs and states of the path that a verification accepted, and of the rows behind it.

    Args:
        roots: [requests, 1], the last token accepted before this step, the root of each tree.
        first: [requests], the position of each root.
        after: [requests * nodes], the tokens after each node, those of accepted ones in front.
        hidden: [requests * nodes, H].
        depth: of a path, its root included: steps + 1.

    Returns:
        ids and positions, [requests, depth], and states, [requests * depth, H], a copy."""
    import torch

    count = len(roots)
    after = after.view(count, -1)
    ids = torch.cat([roots.to(after.dtype), after[:, : depth - 1]], dim=1)
    positions = first[:, None] + torch.arange(depth, device=first.device)
    rows = hidden.view(count, -1, hidden.shape[-1])[:, :depth].reshape(count * depth, -1)
    return ids, positions, rows.clone() if rows.data_ptr() == hidden.data_ptr() else rows


def states_of(result: Any) -> torch.Tensor | None:
    """Return the hidden states [rows, H] of a target's forward; None from a rank that is not the last of the pipeline."""
    return result.logits_output and result.logits_output.hidden_states


@patches.wrap(
    f"{WORKER}.forward_batch_generation",
    relies_on="batch.forward_mode.is_extend",
    when="called=eagle.sglang.verify",
    why=_WHY,
)
def forward_batch_generation(original, self, batch: Any, *args: Any, **kwargs: Any):
    """Note tokens, positions and states of prompts, chunk by chunk; cached prefixes stay unknown.

    The drafter shifts the inputs by one."""
    recorder = recorder_of(self) if batch.forward_mode.is_extend() else None
    if recorder is None:
        return original(self, batch, *args, **kwargs)
    ids, lengths, starts = batch.input_ids, list(batch.extend_lens), list(batch.prefix_lens)
    result = original(self, batch, *args, **kwargs)
    hidden = states_of(result)
    if hidden is not None:
        names = [request.rid for request in batch.reqs]
        recorder.step(names, lengths, ids, positions_of(starts, lengths), hidden)
    return result


def positions_of(starts: list[int], lengths: list[int]) -> torch.Tensor:
    """Return int64 [sum of lengths]: consecutive positions of each request, from the end of its cached prefix on; on the host,
    from where a copy to a device would wait for the forward."""
    import torch

    spans = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return torch.cat(spans)


@patches.wrap(
    "sglang.srt.mem_cache.common:release_kv_cache",
    relies_on=(
        "sglang.srt.managers.schedule_batch:Req.output_ids_through_stop",
        "sglang.srt.managers.schedule_batch:Req.finished",
    ),
    why="Only the scheduler knows which tokens a request kept.",
)
def release_kv_cache(original, req: Any, *args: Any, **kwargs: Any):
    """Pass the tokens of a finished request to the recorder when its cache is released; one that is only retracted gives its
    rows up, as it may be aborted while it waits, and is computed anew otherwise."""
    recorder = current_recorder()
    if recorder is not None:
        tokens = [*req.origin_input_ids, *req.output_ids_through_stop] if req.finished() else []
        recorder.finish({req.rid: (tokens, len(req.origin_input_ids))})
    return original(req, *args, **kwargs)
