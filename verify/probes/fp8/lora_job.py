"""Run the engines of the probe of LoRA adapters: one that is sent three in turn, and fresh ones with each.

The first runs as a user's program with FlashPatch; the others as a script without, ``python lora_job.py WORKDIR``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch.verify.probes.fp8 import tiny

if TYPE_CHECKING:
    import numpy

ADAPTERS = ("one", "two", "three")
MERGED = "merged"
_RANK, _ALPHA = 4, 12
_LAST_ROW = 1.5  # seconds until every process has written its last row


def write(workdir: Path) -> None:
    """Write models ``a`` and ``b``, the adapters, ``bad`` and ``merged``, which is ``b`` with the last adapter in it."""
    import numpy
    from safetensors.numpy import load_file, save_file

    tiny.write(workdir / "a", seed=1)
    weights = load_file(tiny.write(workdir / "b", seed=2) / "model.safetensors")
    matrices = {name: value.shape for name, value in weights.items() if name.endswith("_proj.weight")}
    for seed, name in enumerate(ADAPTERS):
        noise = numpy.random.default_rng(seed)
        parts = {
            f"base_model.model.{weight.replace('.weight', '.lora_A.weight')}": (_RANK, inputs)
            for weight, (_, inputs) in matrices.items()
        } | {
            f"base_model.model.{weight.replace('.weight', '.lora_B.weight')}": (outputs, _RANK)
            for weight, (outputs, _) in matrices.items()
        }
        tensors = {key: 0.05 * noise.standard_normal(shape, numpy.float32) for key, shape in parts.items()}
        _adapter(workdir / name, tensors)
    for weight in matrices:
        stem = f"base_model.model.{weight.removesuffix('.weight')}"
        product = tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
        weights[weight] += numpy.float32(_ALPHA / _RANK) * product
    tiny.write(workdir / MERGED, seed=2)
    save_file(weights, workdir / MERGED / "model.safetensors", metadata={"format": "pt"})
    spoiled = next(iter(tensors))
    _adapter(workdir / "bad", {**tensors, spoiled: tensors[spoiled][:, :-8].copy()})


def _adapter(folder: Path, tensors: dict[str, numpy.ndarray]) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = dict(peft_type="LORA", r=_RANK, lora_alpha=_ALPHA, target_modules=targets, bias="none")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def main() -> None:
    """Run the engine that is updated: ``python -c ... WORKDIR``."""
    workdir = Path(sys.argv[1])
    seen: dict[str, Any] = {}
    try:
        with _opened(workdir / "a", enable_lora=True) as llm:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(workdir / "b")})
            for name in ADAPTERS:
                llm.llm_engine.add_lora(_request(workdir / name))
                _save(workdir / f"{name}.npy", llm, _request(workdir / name))
            _save(workdir / "base.npy", llm, None)
            seen["bad"] = _refusal(llm, workdir / "bad")
            _save(workdir / "kept.npy", llm, _request(workdir / ADAPTERS[-1]))
    except Exception as error:
        traceback.print_exc()
        seen["failed"] = f"{type(error).__name__}: {error}"
    (workdir / "seen.json").write_text(json.dumps(seen))
    time.sleep(_LAST_ROW)
    os._exit("failed" in seen)  # vLLM's shutdown takes seconds


def _fresh(workdir: Path) -> None:
    """Ask a fresh engine on ``b`` under each adapter, one under none, and one on the merged model."""
    tiny.register_model()
    for name in ADAPTERS:
        with _opened(workdir / "b", enable_lora=True) as llm:
            _save(workdir / f"fresh-{name}.npy", llm, _request(workdir / name))
    with _opened(workdir / "b", enable_lora=True) as llm:
        _save(workdir / "fresh-base.npy", llm, None)
    with _opened(workdir / MERGED) as llm:
        _save(workdir / f"{MERGED}.npy", llm, None)
    engine = sys.modules.get("flashpatch.engine")
    if engine is not None and engine.manager.selection.choices:
        raise RuntimeError("these engines are not independent: FlashPatch is in their process")
    os._exit(0)


@contextmanager
def _opened(model: Path, **more: Any) -> Iterator[Any]:
    from vllm import LLM

    lora = dict(max_loras=1, max_lora_rank=8) if more else {}
    llm = LLM(**tiny.engine_arguments(str(model), **more, **lora))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _request(folder: Path) -> Any:
    """An adapter under the one name and number that all have, in place of the one that has them."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, str(folder), load_inplace=True)


def _refusal(llm: Any, folder: Path) -> str:
    try:
        llm.llm_engine.add_lora(_request(folder))
    except Exception as error:
        return str(error)
    return ""


def _save(file: Path, llm: Any, adapter: Any) -> None:
    import numpy

    plain = llm.generate
    llm.generate = lambda *args, **kw: plain(*args, lora_request=adapter, **kw)
    try:
        numpy.save(file, tiny.answers(llm))
    finally:
        del llm.generate


if __name__ == "__main__":
    _fresh(Path(sys.argv[1]))
