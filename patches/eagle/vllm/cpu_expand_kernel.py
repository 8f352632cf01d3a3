"""Correct vLLM's CPU stand-ins for two kernels that verify draft tokens.

The one that expands per-request values to draft tokens hands a converted copy of the output to the kernel unless the output is int64, and the copy is dropped: the
temperatures of draft tokens stay uninitialised memory, and sampled tokens under speculation do not follow the
target's distribution. Greedy requests are not affected. The one that draws a token in place of a rejected draft does not take
an argument that vLLM 0.24 gives it: an engine that speculates does not open there.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from flashpatch.arming.site import Site
from flashpatch.patches.eagle.vllm.targets import WorkerPatch
from flashpatch.record import Contract

MODULE = "vllm.utils.cpu_triton_utils"


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


def on_recovered(original, *args: Any, **kwargs: Any):
    """Around ``_sample_recovered_tokens_kernel_impl``: leave out the precision of the noise, which the caller has applied to
    it already. Newer stand-ins take the argument, and ignore it."""
    if "USE_FP64_GUMBEL" not in inspect.signature(original).parameters:
        kwargs.pop("USE_FP64_GUMBEL", None)
    return original(*args, **kwargs)


def _apply(site: Site) -> None:
    site.wrap(site.patch.wrapper)
    _rebind(site)


def _undo(site: Site) -> None:
    site.unwrap()
    _rebind(site)


def _rebind(site: Site) -> None:
    """Have the kernel that vLLM calls call what the module holds now: before 0.31 an object keeps the function."""
    name = site.patch.targets[0].partition(":")[2]
    module = sys.modules[MODULE]
    kernel = getattr(module, name.removeprefix("_").removesuffix("_impl"), None)
    if hasattr(kernel, "func"):
        kernel.func = getattr(module, name)


EXPAND = WorkerPatch(
    id="eagle.vllm.expand_kernel_impl",
    targets=(f"{MODULE}:_expand_kernel_impl",),
    wrapper=on_expand,
    apply=_apply,
    undo=_undo,
    contract=Contract(
        params=("output", "input_val", "cu_num_tokens", "replace_from", "replace_to"),
        mentions=("torch.ops._C.expand_kernel_impl",),
    ),
    evidence="optional",
    why="On a CPU, vLLM samples draft tokens at temperatures that were never written.",
    how="Expands the values with torch and writes them where they are read.",
    remove_when="vLLM's stand-in copies its result back, as the other stand-ins do.",
)

RECOVERED = WorkerPatch(
    id="eagle.vllm.sample_recovered_tokens_kernel_impl",
    targets=(f"{MODULE}:_sample_recovered_tokens_kernel_impl",),
    wrapper=on_recovered,
    apply=_apply,
    undo=_undo,
    contract=Contract(params=("inv_q",), mentions=("torch.ops._C.sample_recovered_tokens_kernel_impl",)),
    evidence="optional",
    why="On a CPU, vLLM 0.24 gives its stand-in an argument that it does not take: no engine with speculation opens.",
    how="Leaves the argument out, as newer stand-ins do.",
    remove_when="vLLM 0.24 is no longer supported.",
)

PATCHES = (EXPAND, RECOVERED)
