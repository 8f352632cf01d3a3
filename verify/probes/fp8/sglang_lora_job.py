"""Run the engines of the probe of LoRA adapters on SGLang, as a user's program would."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from flashpatch.verify.probes.fp8 import lora_job, sglang_job

NO_PINNED_MEMORY = "SGLang's LoRA layers ask torch for pinned memory (sglang/srt/lora/layers.py), which it has with an accelerator alone"
_LAST_ROW = 1.5  # seconds until every process has written its last row
_NAME = "policy"


def main() -> None:
    """``python -c ... NAME WORKDIR``: ``job`` is sent adapters one after the other, ``fresh`` is opened on them."""
    name, workdir = sys.argv[1], Path(sys.argv[2])
    seen: dict[str, Any] = {"answers": {}}
    try:
        {"job": _job, "fresh": _fresh}[name](workdir, seen)
    except Exception as error:
        traceback.print_exc()
        seen["failed"] = f"{type(error).__name__}: {error}"
    (workdir / f"{name}.json").write_text(json.dumps(seen))
    time.sleep(_LAST_ROW)
    os._exit("failed" in seen)  # the probe ends what is left of this session


def _job(workdir: Path, seen: dict[str, Any]) -> None:
    """Update the base, send each adapter in turn under one name, then one that does not fit."""
    config = json.loads((workdir / lora_job.ADAPTERS[0] / "adapter_config.json").read_text())
    engine = _opened(workdir / "a", max_lora_rank=8, lora_target_modules=config["target_modules"])
    sglang_job.update(engine, str(workdir / "b"))
    for name in lora_job.ADAPTERS:
        _load(engine, workdir / name)
        seen["answers"][name] = sglang_job.answers(engine, lora_path=_NAME)
    seen["answers"]["base"] = sglang_job.answers(engine)
    seen["bad"] = ""
    try:
        _load(engine, workdir / "bad")
    except RuntimeError as error:
        seen["bad"] = str(error)
    seen["answers"]["kept"] = sglang_job.answers(engine, lora_path=_NAME)


def _fresh(workdir: Path, seen: dict[str, Any]) -> None:
    """Ask an engine that is opened with all adapters under each and under none, then one on the merged model."""
    adapters = [f"{name}={workdir / name}" for name in lora_job.ADAPTERS]
    engine = _opened(workdir / "b", lora_paths=adapters)
    for name in lora_job.ADAPTERS:
        seen["answers"][name] = sglang_job.answers(engine, lora_path=name)
    seen["answers"]["base"] = sglang_job.answers(engine)
    engine.shutdown()
    import sglang

    engine = sglang.Engine(**sglang_job.engine_arguments(str(workdir / lora_job.MERGED)))
    seen["answers"][lora_job.MERGED] = sglang_job.answers(engine)


def _opened(model: Path, **more: Any) -> Any:
    import sglang
    import torch

    if not torch.cuda.is_available():
        try:
            torch.zeros(1, pin_memory=True)
        except RuntimeError as error:
            raise RuntimeError(NO_PINNED_MEMORY) from error
        more["lora_backend"] = "torch_native"  # the others are in Triton
    return sglang.Engine(**sglang_job.engine_arguments(str(model), enable_lora=True, **more))


def _load(engine: Any, folder: Path) -> None:
    def load() -> tuple[bool, str]:
        answer = engine.load_lora_adapter(_NAME, str(folder))
        return answer.success, answer.error_message

    sglang_job.when_idle(load)
