"""Send a checkpoint as other trainers do, into an engine that carries their own worker extension.

Everything runs in the engine's process; the trainer's end is a thread. `SENDERS` has one function per package and door:
``(llm, items)``, raises what the trainer's or the worker's end raised."""

import asyncio
import contextlib
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import shared_memory
from typing import Any
from unittest import mock

import nccl_standin
import vllm_updates as updates
from vllm_lab import engines, models

Items = Sequence[tuple[str, Any]]

EXTENSIONS = {
    "openrlhf": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
    "swift": "swift.pipelines.infer.rollout.WeightSyncWorkerExtension",
    "checkpoint_engine": "checkpoint_engine.worker.VllmColocateWorkerExtension",
    "prime_rl": "prime_rl.inference.vllm.worker.filesystem.FileSystemWeightUpdateWorker",
}
PLUGINS = {"VLLM_PLUGINS": "flashpatch,lab_fp8_standin"}
"""vLLM's plugins of an engine in this lane: ms-swift's own needs torchvision, and ends every engine without it."""

PATIENCE = 20
"""Seconds that an end waits for the other one."""


@contextlib.contextmanager
def beside(action: Callable[[], None]) -> Iterator[None]:
    """Run ``action`` in a thread meanwhile; raise its error at the end, if there is no other."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(2 * PATIENCE)
    if errors:
        raise errors[0]


def address() -> str:
    return f"ipc://{tempfile.gettempdir()}/flashpatch-{uuid.uuid4().hex[:12]}.sock"


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def open_port() -> int:
    from vllm.utils.network_utils import get_open_port

    return get_open_port()


# --- OpenRLHF: one broadcast per parameter


def openrlhf(llm: Any, items: Items) -> None:
    """As OpenRLHF's actor does it: a call per parameter, and nothing that says the last has come."""
    from openrlhf.utils.distributed_util import stateless_init_process_group

    port, group = open_port(), []
    with nccl_standin.installed():
        with beside(lambda: group.append(stateless_init_process_group("127.0.0.1", port, 0, 2, "cpu"))):
            arguments = ("127.0.0.1", port, 1, 2, "openrlhf", "nccl", False)
            llm.collective_rpc("init_process_group", args=arguments)
        for number, (name, tensor) in enumerate(items):
            with beside(lambda tensor=tensor: group[0].broadcast(tensor, src=0)):
                llm.collective_rpc(
                    "update_weight", args=(name, tensor.dtype, tensor.shape, number == len(items) - 1)
                )


# --- ms-swift: buckets through shared memory, or broadcasts


def swift_shared_memory(llm: Any, items: Items) -> None:
    """ms-swift's own sender, as its Ray trainer uses it for weights that lie on a CPU."""
    from swift.ray.megatron.rollout.weight_transfer import BucketedWeightSender

    handle = address()

    async def send() -> None:
        async with BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True, timeout_s=PATIENCE) as sender:
            await sender.handshake()
            await sender.send_weights(iter(items))

    with beside(lambda: asyncio.run(send())):
        call = dict(use_shm=True, zmq_handle=handle, timeout_s=PATIENCE)
        llm.collective_rpc("update_weights_from_ipc", kwargs=call)


def swift_broadcast(llm: Any, items: Items) -> None:
    """The door of ``swift rollout``'s server: flattened buckets by broadcast, then post-processing by a call."""
    import swift.pipelines.infer.rollout as rollout
    from swift.rlhf_trainers.utils import FlattenedTensorBucket
    from vllm.distributed.utils import StatelessProcessGroup

    port, group = open_port(), []
    with (
        nccl_standin.installed(),
        mock.patch.object(rollout, "PyNcclCommunicator", nccl_standin.StoreCommunicator),
    ):
        with beside(
            lambda: group.append(
                StatelessProcessGroup.create("127.0.0.1", port, 1, 2, store_timeout=PATIENCE)
            )
        ):
            llm.collective_rpc("init_communicator", args=("127.0.0.1", port, 2))
        try:
            for start in range(0, len(items), 5):
                bucket = FlattenedTensorBucket(named_tensors=items[start : start + 5])

                def send(tensor: Any = bucket.get_flattened_tensor()) -> None:
                    nccl_standin.StoreCommunicator(group[0], "cpu").broadcast(tensor, src=1)
                    group[0].barrier()

                with beside(send):
                    metadata = [one.model_dump() for one in bucket.get_metadata()]
                    llm.collective_rpc("update_flattened_params", args=(metadata,))
            llm.collective_rpc("process_weights_after_loading")
        finally:
            llm.collective_rpc("close_communicator")


# --- checkpoint-engine: buckets in one buffer, used by halves


def shared_buffer(name: str, size: int) -> Any:
    """The receiver's side of a handle: memory that both ends see, in place of CUDA IPC."""
    import torch

    memory = shared_memory.SharedMemory(name=name)
    buffer = torch.frombuffer(memory.buf, dtype=torch.uint8, count=size)
    buffer.memory = memory
    return buffer


def checkpoint_engine(llm: Any, items: Items) -> None:
    """The protocol of checkpoint-engine's parameter server, message by message."""
    import checkpoint_engine.worker as receiving
    import torch
    import zmq

    handle, half = address(), 4 << 20  # bytes, more than any five tensors of the laboratory
    memory = shared_memory.SharedMemory(create=True, size=2 * half)
    buffer = torch.frombuffer(memory.buf, dtype=torch.uint8)
    buckets = [items[start : start + 5] for start in range(0, len(items), 5)]

    def send() -> None:
        socket = zmq.Context.instance().socket(zmq.REQ)
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            socket.setsockopt(option, PATIENCE * 1000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(handle)
        try:
            socket.send_pyobj((shared_buffer, (memory.name, 2 * half)))
            for number, bucket in enumerate(buckets):
                described, offset = [], number % 2 * half
                for name, tensor in bucket:
                    flat = tensor.contiguous().view(-1).view(torch.uint8)
                    buffer[offset : offset + flat.numel()] = flat
                    described.append(
                        dict(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), offset=offset)
                    )
                    offset += -flat.numel() % 256 + flat.numel()
                if answer := socket.recv():  # to the message before
                    socket.send_pyobj(RuntimeError("Some workers failed to update weights"))
                    raise RuntimeError(f"Failed to update weights due to remote errors: {answer.decode()}")
                socket.send_pyobj(described)
            socket.recv()  # of the last bucket; the parameter server does not look at it
            for _ in ("release the buffer", "run the post hook"):
                socket.send_pyobj(None)
                socket.recv()
        finally:
            socket.close()

    worker_of(llm).__dict__["_device_uuid"] = "cpu"
    try:
        with mock.patch.object(receiving, "DeviceManager", nccl_standin.Devices), beside(send):
            llm.collective_rpc("update_weights_from_ipc", args=({"cpu": handle},))
    finally:
        with contextlib.suppress(BufferError):
            memory.close()
        memory.unlink()


# --- prime-rl: a checkpoint that both ends see, or tensors in the format of kernels


def prime_rl(llm: Any, items: Items) -> None:
    """The file system as transport, prime-rl's default."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(items), f"{folder}/model.safetensors", metadata={"format": "pt"})
        llm.collective_rpc("update_weights_from_path", args=(folder,))


SENDERS: dict[str, Callable[[Any, Items], None]] = {
    "openrlhf": openrlhf,
    "swift, shared memory": swift_shared_memory,
    "swift, broadcast": swift_broadcast,
    "checkpoint_engine": checkpoint_engine,
    "prime_rl": prime_rl,
}


# --- what tests call in the engine's process


def drive(door: str, a: str, b: str, leave_out: str = "", **kw: Any) -> dict[str, Any]:
    """Open an engine on ``a``, send ``b``, then the whole of ``b`` again where something was left out.

    Returns:
        ``error`` of the first sending, or None; ``refusal`` of a request afterwards, or None; ``answers`` where it was
        not refused; ``mended``, the answers after the second."""
    with engines.open_llm(a, worker_extension_cls=EXTENSIONS[door.partition(",")[0]], **kw) as llm:
        items = list(models.weights(b))
        part = [item for item in items if not leave_out or item[0] != leave_out]
        found: dict[str, Any] = dict(error=updates.error(lambda: SENDERS[door](llm, part)))
        found["refusal"] = updates.refusal(llm)
        found["answers"] = engines.answers(llm) if found["refusal"] is None else None
        if leave_out:
            found["error again"] = updates.error(lambda: SENDERS[door](llm, items))
            found["mended"] = engines.answers(llm)
    return found


def kernel_format(a: str) -> dict[str, Any]:
    """Whether prime-rl's transfer in the format of kernels is refused, and what the engine answers afterwards."""
    from prime_rl.inference.vllm.worker import nccl

    with engines.open_llm(a) as llm:
        model = engines.inner_model(llm)
        error = updates.error(lambda: nccl.load_weights_kernel(model, iter(())))
        return dict(error=error, answers=engines.answers(llm))
