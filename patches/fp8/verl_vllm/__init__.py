"""Run verl on vLLM: detect failed peers in a weight transfer, return what each worker committed.

These patches are a group of their own, checked when verl imports its code for vLLM: a job with another engine needs no
vLLM.
"""

from __future__ import annotations

from flashpatch.patches.fp8.verl_vllm import (
    expected_processes,
    generate,
    hijack,
    http_server,
    receiver,
    rollout_worker,
    sender,
    server_adapter,
)

PATCHES = (
    sender.SEND,
    sender.SOCKET,
    sender.CLEANUP,
    receiver.RECEIVE,
    receiver.SOCKET,
    receiver.CLEANUP,
    rollout_worker.PATCH,
    rollout_worker.PREPARE,
    rollout_worker.PROCESS,
    http_server.PATCH,
    http_server.CLEAR,
    server_adapter.UPDATE,
    server_adapter.EXECUTE,
    expected_processes.PATCH,
    generate.PATCH,
    hijack.PATCH,
)
