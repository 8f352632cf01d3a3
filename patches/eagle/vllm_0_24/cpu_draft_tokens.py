"""Let vLLM 0.24's runner for CPUs hand out as many draft tokens as were drafted.

Its buffer has a column for each token that a step can draft at most. The runner for CPUs copies drafts into all columns, and
hands all of them out: a step that drafts fewer fails, and one that drafts a single token hands out copies of it. vLLM's runner
for GPUs cuts the buffer to the drafts, as these patches do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from flashpatch.patches.eagle.vllm.targets import WorkerPatch
from flashpatch.record import Contract

RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"


@contextmanager
def cut_to_drafts(runner: Any) -> Iterator[None]:
    """Give the runner's buffer, ``[requests, most drafts]`` int64, as many columns as the last drafts have, meanwhile."""
    import torch

    whole, drafts = runner.draft_token_ids_cpu, runner._draft_token_ids
    if whole is not None and torch.is_tensor(drafts):
        runner.draft_token_ids_cpu = whole[:, : drafts.shape[1]]
    try:
        yield
    finally:
        runner.draft_token_ids_cpu = whole


def on_copy(original, self, *args: Any, **kwargs: Any):
    """Around ``CPUModelRunner._copy_draft_token_ids_to_cpu``: copy what was drafted, and note how much it is."""
    import torch

    if torch.is_tensor(self._draft_token_ids):
        self.prev_num_spec_tokens = self._draft_token_ids.shape[1]
    with cut_to_drafts(self):
        return original(self, *args, **kwargs)


def on_get(original, self, *args: Any, **kwargs: Any):
    """Around ``CPUModelRunner._get_draft_token_ids_cpu``: hand out what was drafted."""
    with cut_to_drafts(self):
        return original(self, *args, **kwargs)


_Patch = partial(
    WorkerPatch,
    requires="vllm>=0.24,<0.25",
    evidence="optional",
    why="On a CPU, a step of vLLM 0.24 that drafts fewer tokens than it may fails, so the number cannot change.",
    how="Cuts the buffer of draft tokens to those that were drafted, as vLLM's runner for GPUs does.",
    remove_when="vLLM 0.24 is no longer supported.",
)

COPY = _Patch(
    id="eagle.vllm_0_24.copy_draft_token_ids_to_cpu",
    targets=(f"{RUNNER}._copy_draft_token_ids_to_cpu",),
    wrapper=on_copy,
    contract=Contract(
        params=("scheduler_output", "zeros_only"),
        mentions=("self.draft_token_ids_cpu", "self._draft_token_ids"),
        exists=("vllm.v1.worker.gpu_model_runner:GPUModelRunner._copy_draft_token_ids_to_cpu",),
    ),
)

GET = _Patch(
    id="eagle.vllm_0_24.get_draft_token_ids_cpu",
    targets=(f"{RUNNER}._get_draft_token_ids_cpu",),
    wrapper=on_get,
    contract=Contract(mentions=("self.draft_token_ids_cpu", "self._draft_token_req_ids")),
)

PATCHES = (COPY, GET)
