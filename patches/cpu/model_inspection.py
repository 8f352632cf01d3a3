"""Inspect a model's class in the process that asks, if there is no accelerator to keep from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashpatch.record import Contract, Patch

REGISTRY = "vllm.model_executor.models.registry"


def on_run_in_subprocess(original, fn: Callable[[], Any]) -> Any:
    """Replace ``_run_in_subprocess``: call ``fn`` here. What it raises comes as it is, without the ``RuntimeError``
    around the text of another process."""
    return fn()


PATCH = Patch(
    id="cpu.vllm.run_in_subprocess",
    targets=(f"{REGISTRY}:_run_in_subprocess",),
    requires="vllm>=0.24",
    wrapper=on_run_in_subprocess,
    contract=Contract(
        params=("fn",), mentions=("subprocess.run",), exists=(f"{REGISTRY}:_ModelInfo.from_model_cls",)
    ),
    evidence="optional",  # vLLM keeps what it found in a file
    scope=frozenset({"driver"}),
    needs=("cpu.verl.register_platform",),
    why="vLLM imports itself in one more process to look at a model's class, lest the class initializes CUDA in this "
    "one: on two cores some ten seconds of every first start, and of each after another version's.",
    how="Looks at it in the process that asks, which has vLLM imported.",
    remove_when="vLLM does so if there is no accelerator.",
)
