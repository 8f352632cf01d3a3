"""What the labs ask of the device that they run on, fake or real."""

import ctypes
import os
from collections import Counter

IS_FAKE = bool(os.environ.get("FAKE_CUDA"))
REPLAYED: Counter[str] = Counter()


def refused_launches() -> int:
    """Return how many kernels this process could not launch: what they were to compute is missing without an error."""
    return _count("fake_cuda_refused_launches")


def graph_launches() -> int:
    """Return how many captured graphs this process has run; on a GPU since `count_graphs`."""
    return _count("fake_cuda_graph_launches") if IS_FAKE else REPLAYED.total()


def count_graphs() -> None:
    """On a GPU, count from now on what torch replays."""
    import torch

    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        REPLAYED["graphs"] += 1
        replay(graph)

    if not IS_FAKE:
        torch.cuda.CUDAGraph.replay = counted


def _count(name: str) -> int:
    if not IS_FAKE:
        return 0
    function = getattr(ctypes.CDLL(None), name)
    function.restype = ctypes.c_long
    return function()


def is_lost(result: dict) -> bool:
    """Whether what a case ended with leaves a GPU unusable in this process; the fake device goes on."""
    return not IS_FAKE and "CUDA error" in result.get("error", "")
