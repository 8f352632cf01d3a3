"""Correct vLLM's CPU stand-ins for two kernels that verify draft tokens."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from flashpatch.arming.site import Site
from flashpatch.decorate import Patches

MODULE = "vllm.utils.cpu_triton_utils"

patches = Patches("eagle", "vllm>=0.24", scope="worker", evidence="optional")


@patches.register(
    f"{MODULE}:_expand_kernel_impl",
    relies_on="torch.ops._C.expand_kernel_impl",
    params=("output", "input_val", "cu_num_tokens", "replace_from", "replace_to"),
    why="On a CPU, vLLM samples draft tokens at temperatures that were never written.",
    remove_when="vLLM's stand-in copies its result back, as the other stand-ins do.",
)
def expand_kernel_impl(site: Site) -> Callable[[], None]:
    """Expand the values with torch and write them where they are read.

    The stand-in hands a converted copy of the output to the kernel unless the output is int64, and the copy is dropped: sampled
    tokens under speculation do not follow the target's distribution. Greedy requests are not affected."""
    return _replace(site, expand)


def expand(
    original,
    output: Any,
    input_val: Any,
    cu_num_tokens: Any,
    replace_from: Any,
    replace_to: Any,
    *args: Any,
    **kwargs: Any,
):
    """Write to the output itself, not to a converted copy.

    Args:
        output: [tokens], of any dtype; input_val: [requests]; cu_num_tokens: [requests], running sum.
        replace_from, replace_to: a value of ``input_val`` and what to write instead."""
    import torch

    if output.dtype == torch.int64:
        return original(output, input_val, cu_num_tokens, replace_from, replace_to, *args, **kwargs)
    ends = cu_num_tokens.long()
    lengths = torch.diff(ends, prepend=ends.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(values.repeat_interleave(lengths))
    return None


@patches.register(
    f"{MODULE}:_sample_recovered_tokens_kernel_impl",
    relies_on="torch.ops._C.sample_recovered_tokens_kernel_impl",
    params="inv_q",
    why="On a CPU, vLLM 0.24 gives its stand-in an argument that it does not take: no engine with speculation opens.",
    remove_when="vLLM 0.24 is no longer supported.",
)
def sample_recovered_tokens_kernel_impl(site: Site) -> Callable[[], None]:
    """Leave the argument out, which newer stand-ins take and ignore."""
    return _replace(site, recover)


def recover(original, *args: Any, **kwargs: Any):
    """Leave out the precision of the noise, which the caller has applied already, if the stand-in takes none."""
    if "USE_FP64_GUMBEL" not in inspect.signature(original).parameters:
        kwargs.pop("USE_FP64_GUMBEL", None)
    return original(*args, **kwargs)


def _replace(site: Site, function: Callable[..., Any]) -> Callable[[], None]:
    """Wrap a stand-in, and have the kernel that vLLM calls call it: before 0.31 an object keeps the function."""
    name = site.patch.targets[0].partition(":")[2]
    module = sys.modules[MODULE]

    def rebind() -> None:
        kernel = getattr(module, name.removeprefix("_").removesuffix("_impl"), None)
        if hasattr(kernel, "func"):
            kernel.func = getattr(module, name)

    def take_away() -> None:
        site.unwrap()
        rebind()

    site.wrap(function)
    rebind()
    return take_away
