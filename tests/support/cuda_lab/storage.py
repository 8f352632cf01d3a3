"""Load models on a CUDA device, fake or real, and write down their storage: B loaded afresh, or A updated to B.

    python -m cuda_lab.storage fresh|update CHECKPOINTS OUT CASE...

`fresh` runs stock vLLM. `update` runs with FLASHPATCH set; without it, it is stock's own second load.
`CUDA_LAB_MUTANT` is a fault of `cuda_lab.mutants`."""

import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader, get_model_loader
from vllm_lab import models

from cuda_lab import cases, checkpoints, device, mutants, results, state

ENGINE = dict(
    dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=8, skip_tokenizer_init=True
)


def main(mode: str, root: str, out: str, *names: str) -> None:
    mutants.use(os.environ.get("CUDA_LAB_MUTANT", ""))
    for name in names:
        start, before = time.perf_counter(), device.refused_launches()
        result = results.attempt(lambda: (_fresh if mode == "fresh" else _update)(Path(root), name))
        result["launches"] = device.refused_launches() - before
        results.add(out, name, result)
        print(f"{mode} {name}: {result.get('error', 'ok')} {time.perf_counter() - start:.1f} s", flush=True)
        gc.collect()
        if device.is_lost(result):
            break
    results.leave()


def _fresh(root: Path, name: str) -> dict[str, Any]:
    _, model = _loaded(cases.CASES[name], _pair(root, name)[1])
    found, _ = state.snapshot(model)
    return {"found": found}


def _update(root: Path, name: str) -> dict[str, Any]:
    case = cases.CASES[name]
    first, second = _pair(root, name)
    config, model = _loaded(case, first)
    start, before = state.snapshot(model)
    tensors = list(models.weights(second))
    with torch.no_grad(), set_current_vllm_config(config):
        for index in range(0, len(tensors), 5):
            model.load_weights([(key, tensor.cuda()) for key, tensor in tensors[index : index + 5]])
        base_loader.process_weights_after_loading(model, config.model_config, torch.device("cuda:0"))
    found, addresses = state.snapshot(model)
    return {"start": start, "before": before, "found": found, "addresses": addresses}


def _pair(root: Path, name: str) -> tuple[Path, Path]:
    case = cases.CASES[name]
    return checkpoints.pair(root, case.family, case.scheme, **case.config)


def _loaded(case: cases.Case, path: Path) -> tuple[Any, torch.nn.Module]:
    config = EngineArgs(model=str(path), **{**ENGINE, **case.engine}).create_engine_config()
    with set_current_vllm_config(config):
        _one_rank()
        config.load_config.device = None
        loader = get_model_loader(config.load_config)
        return config, loader.load_model(vllm_config=config, model_config=config.model_config)


def _one_rank() -> None:
    from vllm.distributed import parallel_state
    from vllm.v1.worker.workspace import init_workspace_manager

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
    else:
        torch.cuda.set_device(0)
        store = "file://" + tempfile.mktemp(prefix="cuda_lab-")
        parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)
    init_workspace_manager(torch.device("cuda:0"))


if __name__ == "__main__":
    main(*sys.argv[1:])
