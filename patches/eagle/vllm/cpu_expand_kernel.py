"""Correct vLLM's CPU stand-in for the kernel that expands per-request values to draft tokens.

It hands a converted copy of the output to the kernel unless the output is int64, and the copy is dropped: the
temperatures of draft tokens stay uninitialised memory, and sampled tokens under speculation do not follow the
target's distribution. Greedy requests are not affected.
"""

from __future__ import annotations

from typing import Any

from flashpatch.patches.eagle.vllm.targets import WorkerPatch
from flashpatch.record import Contract


def on_expand(
    original,
    output: Any,
    input_val: Any,
    cu_num_tokens: Any,
    replace_from: Any,
    replace_to: Any,
    *args: Any,
    **kwargs: Any,
):
    """Around ``_expand_kernel_impl``: write to the output itself, not to a converted copy.

    Args:
        output: [tokens], of any dtype; input_val: [requests]; cu_num_tokens: [requests], running sum.
        replace_from, replace_to: a value of ``input_val`` and what to write instead.
    """
    import torch

    if output.dtype == torch.int64:
        return original(output, input_val, cu_num_tokens, replace_from, replace_to, *args, **kwargs)
    ends = cu_num_tokens.long()
    lengths = torch.diff(ends, prepend=ends.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(values.repeat_interleave(lengths))
    return None


PATCH = WorkerPatch(
    id="eagle.vllm.expand_kernel_impl",
    targets=("vllm.utils.cpu_triton_utils:_expand_kernel_impl",),
    wrapper=on_expand,
    contract=Contract(
        params=("output", "input_val", "cu_num_tokens", "replace_from", "replace_to"),
        mentions=("torch.ops._C.expand_kernel_impl",),
    ),
    evidence="optional",
    why="On a CPU, vLLM samples draft tokens at temperatures that were never written.",
    how="Expands the values with torch and writes them where they are read.",
    remove_when="vLLM's stand-in copies its result back, as the other stand-ins do.",
)
