"""Weights on their way to SGLang's server on a CPU: they arrive, also where torch's manager of shared memory answers late."""

import asyncio
from pathlib import Path

import pytest
import torch
import warm
from cpu_lab import environment
from machine import limit
from tree import SUPPORT

from flashpatch.patches.cpu import sglang_tensors

LATE = f"{sglang_tensors._TIMED_OUT}\nException raised from recv"


async def pickled(engine, params_batch):
    """Stands for SGLang's ``update_weights``: what it would pickle."""
    return params_batch


def sent(tensor):
    [(name, copy)] = asyncio.run(sglang_tensors.update_weights(pickled, None, [("w", tensor)]))
    assert name == "w"
    return copy


@pytest.fixture
def late(monkeypatch):
    """Let the manager be late so many times."""
    share, left = torch.UntypedStorage._share_filename_cpu_, [0]

    def sharing(self, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise RuntimeError(LATE)
        return share(self, *args, **kwargs)

    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", sharing)
    monkeypatch.setattr(sglang_tensors.asyncio, "sleep", lambda seconds: asyncio.wait_for(done(), 1))
    return left


async def done():
    """Nothing to wait for."""


def test_copies_are_shared_and_the_trainers_own_are_not():
    before = torch.multiprocessing.get_sharing_strategy()
    tensor = torch.arange(4.0)
    copy = sent(tensor)
    assert copy.is_shared() and not tensor.is_shared() and torch.equal(copy, tensor)
    assert torch.multiprocessing.get_sharing_strategy() == before


def test_a_manager_that_is_late_is_asked_again_until_torchs_error_ends_the_update(late):
    late[0] = sglang_tensors._ATTEMPTS - 1
    assert torch.equal(sent(torch.arange(4.0)), torch.arange(4.0)) and late == [0]
    late[0] = 100
    with pytest.raises(RuntimeError, match="has timed out"):
        sent(torch.ones(2))
    assert late[0] == 100 - sglang_tensors._ATTEMPTS


def send(folder: Path, **variables: str) -> str:
    """What became of one tensor."""
    env = environment(folder, SGLANG_USE_CPU_ENGINE="1", **variables)
    command = [SUPPORT / "sglang_send.py"]
    done = warm.run(warm.VERL_SGLANG, command, env=env, cwd=folder, timeout=limit(120))
    assert "shared memory:" in done.stdout, done.stderr[-3000:]
    return done.stdout


@pytest.mark.verl
@pytest.mark.sglang
def test_a_tensor_arrives_and_stays_the_trainers_own(tmp_path: Path) -> None:
    said = send(tmp_path, FLASHPATCH="cpu")
    assert "arrived: w [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]" in said and "shared memory: False" in said
