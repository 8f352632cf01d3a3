"""Compile a model's forward as vLLM does by default on a GPU, on a CPU, and count what was traced."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def like_a_gpu() -> Iterator[None]:
    """Keep vLLM's own mode for engines opened meanwhile: one trace without guards, cut at the operators of attention.

    vLLM takes another mode on a CPU. The pieces run as they were traced, without inductor, which would compile C++ for minutes."""
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    stock = vars(CpuPlatform)["check_and_update_config"]

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        asked = compilation.mode
        stock.__func__(cls, vllm_config)
        if asked == CompilationMode.VLLM_COMPILE:
            compilation.mode, compilation.backend, compilation.compile_sizes = asked, "eager", []

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        with _plain_sampler():
            yield
    finally:
        CpuPlatform.check_and_update_config = stock


@contextlib.contextmanager
def _plain_sampler() -> Iterator[None]:
    """Leave what vLLM compiles beside the model uncompiled: draws, and the ranks of log-probabilities."""
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    compiled = ((sampler, "batched_count_greater_than"), (topk_topp_sampler, "compiled_random_sample"))
    with contextlib.ExitStack() as stack:
        for module, name in compiled:
            function = getattr(module, name)
            plain = getattr(function, "_torchdynamo_orig_callable", function)
            stack.enter_context(mock.patch.object(module, name, plain))
        yield


def traced() -> dict[str, Any]:
    """Return what Dynamo and vLLM count: frames, graphs, operators in them, breaks, pieces, compilations; in this process."""
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    dynamo = {
        name: sum(counters[name].values()) for name in ("frames", "stats", "graph_break", "unimplemented")
    }
    return dynamo | {name: count for name, count in vars(compilation_counter).items() if count}
