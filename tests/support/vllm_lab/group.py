"""Two real engines of one data-parallel group on a CPU, their experts across both, each in a process of its own.

They are vLLM's "offline" data parallelism: each process opens an engine by itself, and they meet through gloo in every forward and
after every step. Experts are cut across the group as tensor parallelism would cut them; with expert parallelism vLLM's kernel for
CPUs reads past its own experts (it takes no map of them) and ends with a segmentation fault."""

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from vllm_lab import engines, scenario

SIZE = 2


def run(function: Callable[..., Any], *args: Any, **kw: Any) -> list[Any]:
    """Call a function of a test file on each of the two ranks, as `scenario.run` does; return both results.

    ``function(rank, *args)`` opens its engine by `open_rank`, and must ask it as often as the other rank does."""
    env = {
        "VLLM_DP_SIZE": str(SIZE),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(_port()),
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with contextlib.ExitStack() as stack:
        runners = [
            stack.enter_context(
                scenario.Runner({**env, "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)})
            )
            for rank in range(SIZE)
        ]
        for runner in runners:  # one after the other: they share the process that forks them
            runner(_ready)
        pool = stack.enter_context(ThreadPoolExecutor(SIZE))
        calls = [pool.submit(runner, function, rank, *args, **kw) for rank, runner in enumerate(runners)]
        ended, waiting = wait(calls, return_when=FIRST_EXCEPTION)
        if waiting:  # for a rank that has failed
            for runner in runners:
                runner.kill()
            for call in ended:
                call.result()
        return [call.result() for call in calls]


def _port() -> int:
    """A free port that no connection is given by the kernel, which takes 32768 and more: vLLM listens on it seconds later."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port of a hundred between 20000 and 32000")


def _ready() -> None:
    """Do nothing, in an interpreter that has started by then."""


@contextlib.contextmanager
def open_rank(model: str, **kw: Any) -> Iterator[Any]:
    """This rank's engine, with the collectives that its communicator lacks."""
    _supply_collectives()
    with engines.open_llm(model, distributed_executor_backend="uni", **kw) as llm:
        yield llm


def _supply_collectives() -> None:
    """Give vLLM's communicator for CPUs the two collectives of experts across engines that it lacks."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = _all_gatherv, _reduce_scatterv


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Join the ranks' rows, of which each has its own number."""
    import torch

    if isinstance(input_, list):
        return [_all_gatherv(self, one, dim, sizes) for one in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    rows = input_.new_zeros((max(sizes), *input_.shape[1:]))
    rows[: input_.shape[0]] = input_
    parts = [torch.empty_like(rows) for _ in sizes]
    torch.distributed.all_gather(parts, rows, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Sum the ranks' rows, and return this rank's part of them."""
    import torch

    total = input_.contiguous().clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    sizes = sizes or [total.shape[0] // self.world_size] * self.world_size
    return total.split(sizes)[self.rank_in_group].contiguous()
