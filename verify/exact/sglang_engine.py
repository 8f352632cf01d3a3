"""Open SGLang's model runner in this process, let it read one sequence, and record its forward pass: by the functions of
SGLang's own ``bench_one_batch``, without scheduler, other processes and prefix cache."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from flashpatch.patches.cpu import platform
from flashpatch.verify.exact.calls import Answered, Call, Prompts, hooked
from flashpatch.verify.exact.causes import BLOCK, OTHERS
from flashpatch.verify.exact.engine import Asker, watched
from flashpatch.verify.exact.forced import Part
from flashpatch.verify.exact.rows import farthest, of_model
from flashpatch.verify.exact.shards import HEAD
from flashpatch.verify.probes.sglang_engine import ADAPTED

LENGTH = "context_length"
PARALLEL = ("tp_size", "pp_size", "dp_size", "ep_size")
NOT_READ = {
    "lora_paths": "and of adapters one is compared: name its folder as adapter",
    "speculative_algorithm": "and drafts are not compared: leave it out, the target's numbers are the same",
}


def defaults(model: str, length: int) -> dict[str, Any]:
    """Return the arguments of `sglang.Engine` for ``length`` tokens of a model."""
    room = {"max_total_tokens": 2 * (1 + OTHERS) * length, "max_running_requests": 2 * (1 + OTHERS)}
    return {"model_path": model, "dtype": "bfloat16", LENGTH: length, **room}


def refusal(settings: Mapping[str, Any]) -> str:
    """Say why an engine with these arguments of `sglang.Engine` cannot be looked into; "" if it can."""
    for name in PARALLEL:
        if (settings.get(name) or 1) > 1:
            return f"{name}={settings[name]}, and only an engine in one process is compared"
    for name, why in NOT_READ.items():
        if settings.get(name):
            return f"{name}={settings[name]}, {why}"
    if settings.get("disable_cuda_graph") is False:
        return "disable_cuda_graph=False, and captured graphs hide modules"
    return ""


@contextmanager
def opened(**arguments: Any) -> Iterator[Any]:
    """Yield SGLang's runner for ``bench_one_batch``, eager, whose model is in this process; it ends with the block."""
    adapted: dict[str, Any] = {}
    if arguments.get("enable_lora"):
        adapted = {"max_lora_rank": 64, "lora_target_modules": list(ADAPTED)}
    if platform.accelerator() is None:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # SGLang asks for it before it takes a CPU
        if adapted:
            adapted["lora_backend"] = "torch_native"  # the others are in Triton
    bench = _bench()
    from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
    from sglang.srt.server_args import PortArgs, ServerArgs

    settings = {
        "disable_cuda_graph": True,
        "disable_radix_cache": True,  # there is none here, and hybrid models on a CPU are refused with it
        "skip_tokenizer_init": True,
        "random_seed": 0,
        **adapted,
        **arguments,
    }
    # A model without a tokenizer is compared too; standard output is the report's.
    with redirect_stdout(sys.stderr), mock.patch.object(bench, "get_tokenizer"):
        args = ServerArgs(**settings)
        if hasattr(args, "resolve_once"):  # 0.5.12 resolves itself
            args.resolve_once()
        bench._set_envs_and_config(args)
        _configure(bench, args)
        runner, _ = bench.load_model(args, PortArgs.init_new(args), 0, 0)
    try:
        yield runner
    finally:
        del runner
        destroy_model_parallel()
        destroy_distributed_environment()
        gc.collect()


def _bench() -> Any:
    """SGLang's module for single batches, which newer versions have elsewhere."""
    newer = "sglang.benchmark.one_batch"
    found = importlib.util.find_spec(newer) is not None
    return importlib.import_module(newer if found else "sglang.bench_one_batch")


def _configure(bench: Any, args: Any) -> None:
    """Set what a scheduler's process sets before it loads a model."""
    if hasattr(bench, "spawn_world_rank"):
        rank = bench.spawn_world_rank(args, tp_rank=0, pp_rank=0)
        bench.publish(args, role="scheduler", ranks=bench.SpawnRanks(world_rank=rank, gpu_id=0))
        bench._init_process_global_configs()
        return
    given = [args]
    if hasattr(bench, "publish"):  # 0.5.20, which reads what was published
        bench.publish(args, role="scheduler")
        given = []
    bench.initialize_moe_config(*given)
    bench.initialize_fp8_gemm_config(*given)
    bench.initialize_fp4_gemm_config(*given)


class Reader(Asker):
    """Ask a runner that was `opened`, as `flashpatch.verify.exact.engine.Reader` does."""

    def __init__(self, runner: Any, adapter: str) -> None:
        self._runner, self._bench = runner, _bench()
        self._under = _loaded(runner, adapter) if adapter else None
        self._inner, model = runner.torch_runner, runner.torch_runner.model
        super().__init__(self._inner.model_config.quantization, {}, farthest(model), of_model(model), adapter)

    def calls(
        self,
        prompts: Prompts,
        steps: Sequence[int] = (0,),
        part: Part | None = None,
        late: int = 0,
        requests: Any = None,
    ) -> Answered:
        """All begin and end together, whatever ``late`` says: there is no scheduler."""
        requests = requests or self._asked(*prompts)
        count = len(requests[0].origin_input_ids)
        with redirect_stdout(sys.stderr), _whole(self._inner.model, part, count) as calls:
            drawn, _, batch = self._runner.extend(requests)
            answer = [drawn]
            for _ in range(max(steps)):
                answer.append(self._runner.decode(answer[-1], batch)[0])
        return [calls], [[int(one[at]) for one in answer] for at in range(len(steps))]

    def cached(self, ids: list[int]) -> tuple[list[list[Call]], list[list[Call]]]:
        requests = self._asked(ids[:BLOCK])
        before, _ = self.calls([], requests=requests)
        cut = self._bench.BenchArgs(cut_len=BLOCK)
        others = self._bench.prepare_extend_inputs_for_correctness_test(cut, [ids], requests, self._inner)
        row = getattr(others[0], "req_pool_idx", None)
        if row is not None:  # 0.5.12, which reads row 0 of its table
            slots = self._inner.req_to_token_pool.req_to_token[row, :BLOCK]
            others[0].prefix_indices = slots.to(others[0].prefix_indices.dtype)
        return before, self.calls([], requests=others)[0]

    def _asked(self, *prompts: list[int]) -> list[Any]:
        self._runner.clear()
        prepare = self._bench.prepare_synthetic_inputs_for_latency_test
        requests = prepare(len(prompts), len(prompts[0]), list(prompts))
        for request in requests:
            request.lora_id = self._under
        return requests


def _loaded(runner: Any, folder: str) -> str:
    """Load an adapter, once; return the name that requests are served under."""
    from sglang.srt.lora.lora_registry import LoRARef

    if folder not in runner.torch_runner.lora_manager.loras:
        ref = LoRARef(lora_id=folder, lora_name=folder, lora_path=folder, pinned=False)
        found = runner.torch_runner.load_lora_adapter(ref)
        if not found.success:
            raise RuntimeError(f"SGLang does not load the adapter {folder}: {found.error_message}")
    return folder


@contextmanager
def _whole(model: torch.nn.Module, part: Part | None, count: int) -> Iterator[list[Call]]:
    """Within, record calls, see `watched`; at the end those of the logits' module have returned the logits of all tokens they were given."""
    logits: list[torch.Tensor] = []

    def after(module: Any, args: tuple, kwargs: dict, returned: Any) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        found = module._get_logits(given["hidden_states"], given["lm_head"], given["logits_metadata"])
        logits.append(found.float().cpu())

    heads = [module for name, module in model.named_modules() if name == HEAD]
    hooks = [head.register_forward_hook(after, with_kwargs=True) for head in heads]
    with hooked(hooks), watched(model, part, count) as calls:
        yield calls
    found = iter(logits)
    calls[:] = [replace(call, returned=next(found)) if call.name == HEAD else call for call in calls]


def reload(runner: Any, checkpoint: str) -> None:
    """Load a checkpoint into the engine, as a trainer sends it."""
    updater = getattr(runner.torch_runner, "weight_updater", runner.torch_runner)  # 0.5.12: the runner itself
    with redirect_stdout(sys.stderr):
        done, message = updater.update_weights_from_disk(checkpoint, "auto")
    if not done:
        raise RuntimeError(f"SGLang does not load {checkpoint}: {message}")
