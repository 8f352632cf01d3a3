"""Engines in processes of their own: each job runs once, and several tests look at what it saw."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import warm
from machine import limit
from tree import SUPPORT


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write tiny checkpoints; return their directory."""
    from drafter_lab import publish
    from transformers import AutoConfig

    from flashpatch.verify.probes.eagle import tiny

    at = tmp_path_factory.mktemp("models")
    tiny.target(at / "target", seed=1)
    _noisy(at / "noisy", at / "target")
    tiny.target(at / "chain", seed=2, adds=0.0)
    tiny.target(at / "chain2", seed=4, adds=0.0)
    tiny.drafter(at / "exact")
    tiny.drafter(at / "exact2", seed=8)
    tiny.drafter(at / "noise", exact=False)
    tiny.target(at / "deep", seed=3, layers=8)
    publish(at / "eagle3", AutoConfig.from_pretrained(at / "deep"))
    tiny.target(at / "nearly", seed=2, adds=0.02)  # whose states depend on the context, and drafts are right
    return at


def _noisy(directory: Path, original: Path) -> None:
    """Write a copy of a checkpoint with noise, which as a draft model is sometimes right."""
    import torch
    from safetensors.torch import load_file, save_file

    noise = torch.Generator().manual_seed(9)
    tensors = load_file(original / "model.safetensors")
    tensors = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise) for name, tensor in tensors.items()
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text((original / "config.json").read_text())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def job(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[dict[str, Any], Path]]:
    """Run a job of `eagle_jobs` with FlashPatch names on; what it saw, and its directory."""

    def run(name: str, names: str = "eagle", **extra: str) -> tuple[dict[str, Any], Path]:
        from flashpatch.verify.probes.eagle import tiny

        at = tmp_path_factory.mktemp(name)
        for model in models.iterdir():
            (at / model.name).symlink_to(model)
        kept = {key: one for key, one in os.environ.items() if not key.startswith(("FLASHPATCH", "VLLM_"))}
        environment = {
            **kept,
            **tiny.ENVIRONMENT,
            "FLASHPATCH_LEDGER": str(at / "ledger"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **extra,
        }
        script = SUPPORT / "eagle_jobs.py"
        arguments = [str(script), name, str(at), names]
        done = warm.run(warm.VLLM, arguments, env=environment, cwd=at, timeout=limit(580))
        output = f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
        assert (at / "seen.json").exists(), output
        (at / "said.log").write_text(done.stdout + done.stderr)
        return json.loads((at / "seen.json").read_text()), at

    return run
