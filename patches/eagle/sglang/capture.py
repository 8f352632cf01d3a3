"""Capture the target's hidden states where SGLang hands them to its drafter, without a forward of their own.

After a verification the accepted path lies at the front of each request's rows, in trees too, since SGLang
moves it there; row ``j`` holds the state at the ``j``-th accepted input. Rows behind the accepted ones hold
rejected drafts: they are fed again by a later step or lie past the request's end, so that `Recorder` drops them, and
no step waits to learn how many were accepted.

Under EAGLE-3 the target hands its drafter inner layers side by side. SGLang 0.5.23 keeps the last hidden states beside
them when its logits processor is told to, which `eagle_worker_v2_init` does before graphs are recorded. SGLang moves the
inner layers of a tree to the front and leaves the last states at their nodes; `last_rows` takes those of the accepted path."""

from __future__ import annotations

import logging
import weakref
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
_KEEP = "keep_last_hidden_states"
_WHY = (
    "A drafter learns from the target's hidden states, which SGLang computes at every step and throws away."
)

_recorder: Recorder | None = None
_made = False
_keeping: list[weakref.ref[Any]] = []  # logits processors that were told to keep the last states


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

    options = engine.options("eagle")
    ledger.role("worker", tp=get_parallel().tp_rank)
    if not options["capture_rate"] or get_parallel().tp_rank != 0:
        return None
    problem = ""
    if not worker.speculative_algorithm.is_eagle():
        problem = f"not under {worker.speculative_algorithm.name}"
    elif worker.speculative_algorithm.is_eagle3():
        problem = keep_last_states(worker._target_worker.model_runner.model)
    if problem:
        _note_off(problem)
        return None
    return make_recorder(options)


def keep_last_states(model: Any) -> str:
    """Make a target return its last hidden states beside the inner layers; return why it cannot, or ""."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not processors or not all(hasattr(one, _KEEP) for one in processors):
        return "EAGLE-3 needs the last hidden states of the target, which SGLang keeps from 0.5.23 on"
    for one in processors:
        if not getattr(one, _KEEP):
            setattr(one, _KEEP, True)
            _keeping.append(weakref.ref(one))
    return ""


def _note_off(problem: str) -> None:
    logger.warning("hidden states are not captured: %s", problem)
    ledger.note(eagle_capture_off=problem)


@patches.wrap(
    f"{WORKER}.__init__",
    relies_on=(
        "self._target_worker",
        "self.speculative_algorithm",
        "sglang.srt.layers.logits_processor:LogitsProcessor",
    ),
    params="target_worker",
    when="called=eagle.sglang.verify",
    why="A drafter learns to give the target's last hidden states; under EAGLE-3 SGLang returns inner layers alone.",
    upstream="SGLang keeps them for --enable-return-aux-hidden-states, which excludes speculation.",
)
def eagle_worker_v2_init(original, self, *args: Any, **kwargs: Any):
    """Tell the target's logits processor to return last states and inner layers, before graphs are recorded."""
    original(self, *args, **kwargs)
    recorder_of(self)


def captured_states(worker: Any, output: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the last hidden states of a target's output, and under EAGLE-3 the inner layers; None if there are none.

    Args:
        output: SGLang's ``LogitsProcessorOutput``; None from a rank that is not the last of the pipeline.

    Returns:
        [rows, H] and [rows, layers * H]."""
    global _recorder
    if output is None or output.hidden_states is None:
        return None, None
    if not worker.speculative_algorithm.is_eagle3():
        return output.hidden_states, None
    if output.last_hidden_states is None:  # graphs recorded before, or a drafter that reads no inner layers
        if _recorder is not None:
            _recorder.close()
            _recorder = None
            _note_off("this EAGLE-3 target returns no last hidden states beside inner layers")
        return None, None
    return output.last_hidden_states, output.hidden_states


def _end_capture(site: Site) -> None:
    global _recorder, _made
    if _recorder is not None:
        _recorder.close()
    _recorder, _made = None, False
    for one in _keeping:
        processor = one()
        if processor is not None:
            setattr(processor, _KEEP, False)
    _keeping.clear()
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
    since={"0.5.21": ("sglang.srt.managers.utils:GenerationBatchResult.accept_index",)},
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
    last, inner = captured_states(self, result.logits_output)
    if last is not None:
        hidden, depth = last if inner is None else inner, self.speculative_num_steps + 1
        ids, positions, rows = accepted_rows(roots, first, result.next_token_ids, hidden, depth)
        layers = None
        if inner is not None:
            rows, layers = last_rows(result, last), [rows]
        names = [request.rid for request in batch.reqs]
        recorder.step(
            names, [ids.shape[1]] * len(names), ids.reshape(-1), positions.reshape(-1), rows, layers
        )
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


def last_rows(result: Any, last: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states of the path that a verification accepted, as `accepted_rows` orders rows.

    Args:
        result: ``accept_index`` [requests, steps + 1] has the row of each accepted node, -1 behind them.
        last: [requests * nodes, H], a row per node of the trees.

    Returns:
        [requests * (steps + 1), H], a copy."""
    return last[result.accept_index.reshape(-1).long().clamp(min=0)]


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
    last, inner = captured_states(self, result.logits_output)
    if last is not None:
        recorder.step(
            [request.rid for request in batch.reqs],
            lengths,
            ids,
            positions_of(starts, lengths),
            last,
            [inner] if inner is not None else None,
        )
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
