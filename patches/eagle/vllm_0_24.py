"""Let vLLM 0.24's runner for CPUs hand out as many draft tokens as were drafted. It goes when verl pins a newer vLLM.

Its buffer has a column for each token that a step can draft at most. The runner for CPUs copies drafts into all columns, and
hands all of them out: a step that drafts fewer fails, and one that drafts a single token hands out copies of it. vLLM's runner
for GPUs cuts the buffer to the drafts, as these patches do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches._shared.context import having

RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"

patches = Patches(
    "eagle",
    "vllm>=0.24,<0.25",
    framework="vllm_0_24",
    scope="worker",
    evidence="optional",
    why="On a CPU, a step of vLLM 0.24 that drafts fewer tokens than it may fails, so the number cannot change.",
    remove_when="vLLM 0.24 is no longer supported.",
)


@patches.wrap(
    f"{RUNNER}._copy_draft_token_ids_to_cpu",
    relies_on=(
        "self.draft_token_ids_cpu",
        "self._draft_token_ids",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._copy_draft_token_ids_to_cpu",
    ),
    params=("scheduler_output", "zeros_only"),
)
def copy_draft_token_ids_to_cpu(original, self, *args: Any, **kwargs: Any):
    """Copy what was drafted, and note how much it is: cut the buffer of draft tokens, as vLLM's runner for GPUs does."""
    import torch

    if torch.is_tensor(self._draft_token_ids):
        self.prev_num_spec_tokens = self._draft_token_ids.shape[1]
    with cut_to_drafts(self):
        return original(self, *args, **kwargs)


@patches.wrap(
    f"{RUNNER}._get_draft_token_ids_cpu", relies_on=("self.draft_token_ids_cpu", "self._draft_token_req_ids")
)
def get_draft_token_ids_cpu(original, self, *args: Any, **kwargs: Any):
    """Hand out what was drafted: cut the buffer of draft tokens, as vLLM's runner for GPUs does."""
    with cut_to_drafts(self):
        return original(self, *args, **kwargs)


def cut_to_drafts(runner: Any) -> AbstractContextManager[None]:
    """Give the runner's buffer, ``[requests, most drafts]`` int64, as many columns as the last drafts have, meanwhile."""
    import torch

    whole, drafts = runner.draft_token_ids_cpu, runner._draft_token_ids
    drafted = whole is not None and torch.is_tensor(drafts)
    return having(runner, "draft_token_ids_cpu", whole[:, : drafts.shape[1]] if drafted else whole)
