"""What a CPU lacks of the trainers' transports: NCCL, and the device that OpenRLHF and checkpoint-engine name.

`installed()` replaces NCCL's communicator by one that sends through the TCP store of the same process group, and sends
what is asked for on "cuda" to the CPU. All else, worker extensions and rendezvous included, stays the packages' own."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class StoreCommunicator:
    """The part of ``PyNcclCommunicator`` that weight transfers use, over a ``StatelessProcessGroup``."""

    def __init__(self, group: Any, device: Any, library_path: str | None = None) -> None:
        self.group, self.device = group, torch.device("cpu")
        self.rank, self.world_size = group.rank, group.world_size
        self.available, self.disabled = True, False

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Send the values of ``tensor`` from rank ``src``, or fill it with them."""
        if self.rank == src:
            self.group.broadcast(tensor, src)
        else:
            tensor.copy_(self.group.broadcast(tensor, src))


class OnTheCPU(TorchFunctionMode):
    """Within, tensors that are asked for on "cuda" are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def nothing(*_: Any, **__: Any) -> None:
    """Stands for what waits for a device or frees its memory."""


DEVICE = SimpleNamespace(synchronize=nothing, ipc_collect=nothing, empty_cache=nothing)


class Devices:
    """The part of checkpoint-engine's ``DeviceManager`` that its worker uses."""

    device_module = DEVICE


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """In this process, for the time of a transfer."""
    from vllm.distributed.device_communicators import pynccl

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(pynccl, "PyNcclCommunicator", StoreCommunicator))
        for name in ("current_stream", "synchronize"):
            stack.enter_context(mock.patch.object(torch.cuda, name, nothing))
        stack.enter_context(OnTheCPU())
        yield
