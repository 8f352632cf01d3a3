"""Open a whole engine on a CUDA device, fake or real, update it from A to B, and write down its answers.

    python -m cuda_lab.engine fresh|update CHECKPOINTS OUT CASE[@MODEL][:STEP...]...

`fresh` opens B, or the folder of a model, on stock vLLM and asks it. `update` runs with FLASHPATCH set: it opens A, asks it, goes through the steps,
each of `STEPS`, and asks again. `graphs` lets the engine capture CUDA graphs, `defaults` is what vLLM does without being told,
compiled and captured (on the fake device as `graphs`); without either, all is eager.
`CUDA_LAB_MUTANT` is a fault of `cuda_lab.mutants`."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import vllm
from vllm.config.kernel import KernelConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform
from vllm_lab import models

from cuda_lab import cases, checkpoints, device, mutants, results, state

ENGINE = dict(
    dtype="bfloat16",
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=128,
    kv_cache_memory_bytes=16 << 20,
    gpu_memory_utilization=0.5,
    enable_prefix_caching=False,
    skip_tokenizer_init=True,
    max_logprobs=-1,
)
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
COLD = {"enable_jit_warmup": False} if hasattr(KernelConfig, "enable_jit_warmup") else {}  # not in vLLM 0.24
PROMPTS = [[3 + 7 * i % 200 for i in range(length)] for length in (12, 33)]


def main(mode: str, root: str, out: str, *scenarios: str) -> None:
    mutants.use(os.environ.get("CUDA_LAB_MUTANT", ""))
    device.count_graphs()
    os.environ["VERL_RAY_JOB_ID"] = f"cuda-lab-{os.getpid()}"  # verl's worker finds its sender by it
    for scenario in scenarios:
        start, launched = time.perf_counter(), device.graph_launches()
        result = results.attempt(lambda: run(mode, Path(root), *scenario.split(":")))
        if not device.is_lost(result):
            cleanup_dist_env_and_memory()
            type(current_platform)._global_graph_pool = None  # it ended with the engine's graphs
        workers = result.get("workers", [])
        result["launches"] = sum(worker["launches"] for worker in workers)
        result["graphs"] = min((worker["graphs"] - launched for worker in workers), default=0)
        results.add(out, scenario, result)
        print(
            f"{mode} {scenario}: {result.get('error', 'ok')} {time.perf_counter() - start:.1f} s", flush=True
        )
        if device.is_lost(result):
            break
    results.leave()


def run(mode: str, root: Path, name: str, *steps: str) -> dict[str, Any]:
    name, _, model = name.partition("@")
    case, second = cases.CASES[name], Path(model)
    if not model:
        first, second = checkpoints.pair(root, case.family, case.scheme, **case.config)
    if mode == "fresh":
        llm = opened(case, second, steps)
        answers, again = ask(llm), ask(llm)
        return {"answers": answers, "again": again, "workers": of_workers(llm)}
    return updated(opened(case, first, steps), second, steps)


def opened(case: cases.Case, path: Path, steps: tuple[str, ...]) -> vllm.LLM:
    sleeps = any(step.startswith("sleep") for step in steps)
    how: dict[str, Any] = {"compilation_config": GRAPHS}
    if "defaults" in steps and not device.IS_FAKE:
        how = {}
    elif not {"graphs", "defaults"} & set(steps):
        how = {"enforce_eager": True}
    kernels = {**COLD, **case.engine.get("kernel_config", {})}
    arguments = {**ENGINE, **how, **case.engine, "kernel_config": kernels}
    return vllm.LLM(str(path), **arguments, enable_sleep_mode=sleeps)


def updated(llm: vllm.LLM, second: Path, steps: tuple[str, ...]) -> dict[str, Any]:
    before = ask(llm)
    first = of_workers(llm)
    for step in steps:
        STEPS[step](llm, second)
    moved = [
        path
        for one, other in zip(first, of_workers(llm), strict=True)
        for path, address in one["addresses"].items()
        if other["addresses"].get(path) != address
    ]
    answers = ask(llm)
    return {"before": before, "answers": answers, "moved": moved, "workers": of_workers(llm)}


def of_workers(llm: vllm.LLM) -> list[dict[str, Any]]:
    """Return by rank what `told` says."""
    return llm.collective_rpc(told)


def told(worker: Any) -> dict[str, Any]:
    """Return a worker's model runner, what is found in its model, and how often its process could not run a kernel and ran a graph."""
    found, addresses = state.snapshot(worker.model_runner.model)
    return {
        "runner": type(worker.model_runner).__module__,
        "found": found,
        "addresses": addresses,
        "launches": device.refused_launches(),
        "graphs": device.graph_launches(),
    }


def worker(llm: vllm.LLM) -> Any:
    """Return the worker of an engine in this process."""
    driver = llm.llm_engine.model_executor.driver_worker
    return getattr(driver, "worker", driver)


def reload(llm: vllm.LLM, second: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})


def buckets(llm: vllm.LLM, second: Path) -> None:
    """Load as verl does: some tensors a call, then post-processing."""
    llm.collective_rpc(load_in_buckets, args=(str(second),))


def load_in_buckets(worker: Any, second: str) -> None:
    runner = worker.model_runner
    weights = [(name, tensor.cuda()) for name, tensor in models.weights(Path(second))]
    for index in range(0, len(weights), 5):
        runner.model.load_weights(weights[index : index + 5])
    base_loader.process_weights_after_loading(runner.model, runner.model_config, runner.device)


def sent(llm: vllm.LLM, second: Path) -> None:
    """Load through CUDA IPC handles to this process's memory."""
    from cuda_lab import sender  # which imports transformers' models

    sender.send(llm, second)


def sent_by_verl(llm: vllm.LLM, second: Path, lacking: str = "") -> None:
    """Load through verl's buckets."""
    from cuda_lab import verl_sender

    verl_sender.send(llm, second, lacking)


def out_of_place(llm: vllm.LLM, second: Path) -> None:
    """Update as nobody should: the values are B's, at new addresses; a captured graph goes on reading A's."""
    live = [
        (parameter, parameter.data, parameter.data.clone())
        for parameter in worker(llm).model_runner.model.parameters()
    ]
    reload(llm, second)
    for parameter, memory, old in live:
        parameter.data = memory.clone()
        memory.copy_(old)


STEPS = {
    "reload": reload,
    "buckets": buckets,
    "ipc": sent,
    "verl": sent_by_verl,
    "verl-lacking": lambda llm, second: sent_by_verl(llm, second, "layers.0.mlp.down_proj.weight"),
    "out-of-place": out_of_place,
    "sleep1": lambda llm, _: llm.sleep(level=1),
    "sleep2": lambda llm, _: llm.sleep(level=2),
    "wake-weights": lambda llm, _: llm.wake_up(tags=["weights"]),
    # Without tags vLLM 0.24 maps the weights once more.
    "wake-cache": lambda llm, _: llm.wake_up(tags=["kv_cache"]),
    "wake": lambda llm, _: llm.wake_up(),
    "graphs": lambda llm, _: None,
    "defaults": lambda llm, _: None,
}


def ask(llm: vllm.LLM, prompts: list[list[int]] = PROMPTS, count: int = 4):
    """Return by prompt ``count`` greedy tokens and the log-probability of every token at each."""
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=-1
    )
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    answers = [answer.outputs[0] for answer in llm.generate(inputs, sampling, use_tqdm=False)]
    return [
        (list(answer.token_ids), [[at[token].logprob for token in sorted(at)] for at in answer.logprobs])
        for answer in answers
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
