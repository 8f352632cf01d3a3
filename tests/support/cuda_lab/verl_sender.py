"""Send weights to an engine as verl's trainer does, in buckets through memory that the worker opens by its CUDA IPC handle."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vllm
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from vllm_lab import models

MIB = 1


def send(llm: vllm.LLM, checkpoint: Path, lacking: str = "") -> None:
    """Load a checkpoint into this process's CUDA memory, and hand it over while the worker receives.

    ``llm``: with verl's extension of the worker, in another process; ``checkpoint``: of a transformers model; a tensor larger
    than a bucket goes by a handle of its own; ``lacking``: the end of the names that are left out."""
    trained = checkpoint.with_name(checkpoint.name.removesuffix("-block"))  # verl's worker rounds to blocks
    found = models.weights(trained)
    weights = [(name, tensor.cuda()) for name, tensor in found if not lacking or not name.endswith(lacking)]
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(llm.collective_rpc, "update_weights_from_ipc")
        asyncio.run(BucketedWeightSender(socket(), MIB).async_send_weights(iter(weights)))
        (receipt,) = received.result()
    assert receipt is None or receipt["states"] == ["ready"] and receipt["before"] != receipt["after"], (
        receipt
    )


def socket() -> str:
    """Return the address that verl's worker makes of the environment."""
    return f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"
