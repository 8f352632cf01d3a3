"""Updates of verl's SGLang server by verl's client: what arrives is exact, and every failure reaches the trainer."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import sglang_lab
import warm
from cpu_lab import environment
from machine import limit
from tree import SUPPORT
from verl_sglang_lab import PROMPTS

pytestmark = [pytest.mark.verl, pytest.mark.sglang]

LAB = SUPPORT / "verl_sglang_lab.py"
GENERATE = f"fp8.verl_{sglang_lab.FRAMEWORK}.generate"
END = "update_weights_from_tensor" if sglang_lab.OLD else "end_weight_update"  # what ends a session


@pytest.fixture(scope="module")
def models(wide_world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape whose weights fill several buckets."""
    import torch
    from safetensors.torch import load_file, save_file

    first, second = wide_world / "model", tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(first, second)
    random = torch.Generator().manual_seed(5)
    file = "model.safetensors"
    tensors = {
        name: tensor + torch.randn(tensor.shape, generator=random).to(tensor.dtype) * 0.1
        for name, tensor in load_file(first / file).items()
    }
    save_file(tensors, second / file, metadata={"format": "pt"})
    return first, second


PATIENCE = round(limit(6))  # seconds of transfer_timeout


def lab(models: tuple[Path, Path], folder: Path, **variables: str) -> dict[str, Any]:
    """What the laboratory saw in processes of its own, which are all ended."""
    try:
        env = environment(
            folder, f"[fp8]\ntransfer_timeout = {PATIENCE}\n", SGLANG_USE_CPU_ENGINE="1", **variables
        )
        command = [LAB, *models, folder]
        done = warm.run(warm.VERL_SGLANG, command, env=env, cwd=folder, timeout=limit(400))
    finally:
        end_descendants(folder)
    assert done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def end_descendants(folder: Path) -> None:
    """End what was started with this folder's fault file: Ray's processes and servers, stopped ones too."""
    import psutil

    mark = f"FLASHPATCH_LEDGER={folder}"
    for process in psutil.process_iter():
        try:
            ours = any(f"{name}={value}".startswith(mark) for name, value in process.environ().items())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if ours and process.pid != os.getpid():
            process.kill()


@pytest.fixture(scope="module")
def seen(models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return lab(models, tmp_path_factory.mktemp("sync"), FLASHPATCH="cpu,bf16")


@pytest.fixture(scope="module")
def fresh(models, tmp_path_factory: pytest.TempPathFactory) -> list[list[list[float]]]:
    """What engines answer that were opened on each model."""
    steps = [["sampled", dict(times=1, count=8, prompt=prompt, temperature=0)] for prompt in PROMPTS]
    jobs = [dict(model=str(model), steps=steps) for model in models]
    ended = sglang_lab.together(tmp_path_factory.mktemp("fresh"), *jobs)
    assert all(one.done for one in ended), "\n".join(map(str, ended))
    return [[[*one["ids"], *one["logprobs"]] for [one] in job.steps] for job in ended]


def test_a_server_starts_and_an_update_answers_as_a_fresh_engine(seen, fresh) -> None:
    a, b = fresh
    assert seen["launched"] == "" and a != b, "both models answer alike: nothing would be shown"
    assert seen["a"] == a
    assert seen["update"] == "" and seen["a as b"] == b


def test_the_receipt_has_what_was_committed(seen) -> None:
    [sync] = seen["receipts"]
    [worker] = sync["workers"]
    assert sync["called"] and sync["step"] == 1 and worker["id"] == sync["id"]
    assert (worker["before"], worker["after"], worker["states"]) == ([0], [1], ["ready"])
    assert worker["tensors"] == sync["tensors"] > 20 and sync["bytes"] > 1 << 20
    assert worker["load"] > 0 and worker["process"] > 0 and not worker["retry"]


def test_a_loader_that_raises_reaches_the_trainer_with_its_traceback(seen) -> None:
    for word in ("LookupError: cannot place this tensor", "in load_weights", "update_weights_from_tensor"):
        assert word in seen["raised"]
    assert GENERATE in seen["refused"] and "cannot place this tensor" in seen["refused"]


def test_a_complete_update_after_a_failed_one_is_exact(seen) -> None:
    assert seen["again"] == "" and seen["a again"] == seen["a"]
    [worker] = seen["receipts again"][-1]["workers"]
    assert worker["retry"] and worker["states"] == ["ready"]


def test_a_generator_that_raises_leaves_nothing_to_serve(seen, fresh) -> None:
    assert "no weights today" in seen["generator"] and GENERATE in seen["refused too"]
    assert f"refused {END}" in seen["incomplete"] and "did not come" in seen["incomplete"]
    assert seen["healed"] == "" and seen["a as b again"] == fresh[1]


def test_a_server_that_stops_or_dies_is_named_in_seconds(seen) -> None:
    assert f"has not answered update_weights_from_tensor for {PATIENCE} s" in seen["stopped"]
    assert PATIENCE <= seen["stopped seconds"] < PATIENCE + limit(60)
    assert seen["went on"] == "" and seen["a at last"] == seen["a"]
    assert "is gone: update_weights_from_tensor ended with" in seen["killed"] and seen["killed seconds"] < 240
