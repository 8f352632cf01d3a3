"""Load models into SGLang 0.5.12 on the fake device and write down their storage: B loaded afresh, or A updated to B.

    python -m cuda_lab.sglang_storage fresh|update CHECKPOINTS OUT CASE...

`fresh` runs stock SGLang. `update` runs with FLASHPATCH set; without it, it is stock's own second load."""

import functools
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from vllm_lab import models

from cuda_lab import checkpoints, device, results, sglang_cases, state

ENGINE = dict(
    device="cuda",
    dtype="bfloat16",
    skip_tokenizer_init=True,
    disable_cuda_graph=True,
    mem_fraction_static=0.5,
)


def main(mode: str, root: str, out: str, *names: str) -> None:
    for name in names:
        before = device.refused_launches()
        case, run = sglang_cases.CASES[name], _fresh if mode == "fresh" else _update
        pair = functools.partial(checkpoints.pair, Path(root), case.family, case.scheme, **case.config)
        result = results.attempt(lambda: run(case, *pair()))
        result["launches"] = device.refused_launches() - before
        results.add(out, name, result)
        print(f"{mode} {name}: {result.get('error', 'ok')}", flush=True)
        gc.collect()
    results.leave()


def _fresh(case: sglang_cases.Case, _: Path, second: Path) -> dict[str, Any]:
    _, model = _loaded(case, second)
    return {"found": state.snapshot(model)[0]}


def _update(case: sglang_cases.Case, first: Path, second: Path) -> dict[str, Any]:
    loader, model = _loaded(case, first)
    start, before = state.snapshot(model)
    weights = ((name, tensor.cuda()) for name, tensor in models.weights(second))
    with torch.no_grad():  # as SGLang loads from a disk
        loader.load_weights_and_postprocess(model, weights, torch.device("cuda"))
    found, addresses = state.snapshot(model)
    return {"start": start, "before": before, "found": found, "addresses": addresses}


def _loaded(case: sglang_cases.Case, path: Path) -> tuple[Any, torch.nn.Module]:
    arguments = ServerArgs(model_path=str(path), **{**ENGINE, **case.engine})
    set_global_server_args_for_scheduler(arguments)
    initialize_moe_config(arguments)
    config = ModelConfig.from_server_args(arguments)
    _one_rank(arguments, config)
    loader = get_model_loader(LoadConfig(load_format=arguments.load_format), config)
    return loader, loader.load_model(model_config=config, device_config=DeviceConfig("cuda", 0))


def _one_rank(arguments: ServerArgs, config: ModelConfig) -> None:
    if not torch.distributed.is_initialized():
        torch.cuda.set_device(0)
        parallel_state.set_custom_all_reduce(False)
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method="file://" + tempfile.mktemp(prefix="cuda_lab-"),
            backend="gloo",
        )
        parallel_state.initialize_model_parallel()
    initialize_dp_attention(arguments, config)


if __name__ == "__main__":
    main(*sys.argv[1:])
