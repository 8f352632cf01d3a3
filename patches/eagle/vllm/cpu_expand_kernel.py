"""vLLM's CPU stand-in for the kernel that spreads per-request values over draft tokens.

It hands a converted copy of the output to the kernel unless the output is int64, and the copy is dropped: the
temperatures of draft tokens stay uninitialised memory, and sampled tokens under speculation do not follow the
target's distribution. Greedy requests are not affected.
"""

from __future__ import annotations

from typing import Any

from flashpatch.patches.eagle.vllm.targets import WORKERS
from flashpatch.record import Contract, Patch


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
    """Write to the output itself.

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


PATCH = Patch(
    id="eagle.vllm.expand_kernel_impl",
    targets=("vllm.utils.cpu_triton_utils:_expand_kernel_impl",),
    wrapper=on_expand,
    contract=Contract(
        params=("output", "input_val", "cu_num_tokens", "replace_from", "replace_to"),
        mentions=("torch.ops._C.expand_kernel_impl",),
    ),
    evidence="optional",
    why="On a CPU, vLLM samples draft tokens at temperatures that were never written.",
    how="Spreads the values with torch and writes them where they are read.",
    **{**WORKERS, "remove_when": "vLLM's stand-in copies its result back, as its neighbours do."},
)
