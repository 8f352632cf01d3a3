"""Run jobs that capture: one engine in this process, several processes, EAGLE-3 layers, and no speculation."""

import os
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle_job_common as lab

MOST = 4


def capture(at: Path) -> None:
    """Run greedy and sampled requests with chunked prompts, cached prefixes, preemption and aborts, while the
    number of tokens changes at every step."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from flashpatch.patches.eagle.capture.sample_queue import SampleReader

    chunked = dict(max_num_batched_tokens=48, block_size=32)
    llm = lab.opened(at / "target", at / "noisy", "draft_model", MOST, **chunked)
    controller = lab.controller_of(llm)
    controller.policy = policy = lab.Cycle([2, 4, 0, 1, 3])
    seen: dict[str, Any] = {"preempted": 0}
    preempt = Scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    Scheduler._preempt_request = counted

    def ask(name: str, texts: list[list[int]], **how: Any) -> None:
        seen[name] = [
            dict(lab.row_of(one), cached=one.num_cached_tokens, reason=one.outputs[0].finish_reason)
            for one in lab.generate(llm, texts, **how)
        ]

    texts = lab.prompts()
    ask("greedy", texts, max_tokens=40, logprobs=0)
    ask("cached", [texts[5] + texts[0]], max_tokens=20, logprobs=0)
    ask("sampled", texts, temperature=1.0, max_tokens=30, logprobs=0)
    eos = Counter(token for row in seen["greedy"] for token in row["tokens"]).most_common(1)[0][0]
    ask("stopped", texts, max_tokens=40, stop_token_ids=[eos])
    ask("long", [texts[0] + texts[2]], max_tokens=256 - 38, logprobs=0)
    one = llm.llm_engine
    lab.begin(llm, "again", texts[:4], 40, steps=9)
    lab.core_of(llm).scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts all of them
    done: dict[str, list[int]] = {}
    while one.has_unfinished_requests():
        done |= {
            output.request_id: list(output.outputs[0].token_ids) for output in one.step() if output.finished
        }
    seen["again"] = [done[f"again-{number}"] for number in range(4)]
    lab.begin(llm, "abort", texts[:3], 100, steps=8)
    one.abort_request([f"abort-{number}" for number in range(3)])
    seen["drafted"], seen["accepted"] = controller.drafted, controller.accepted
    seen["steps"], seen["recent"] = controller.steps, [arm.steps for arm in controller.recent]
    seen["updates"] = policy.updates
    controller.policy = lab.Cycle([0])
    ask("plain", texts, max_tokens=40, logprobs=0)
    seen["flush"] = lab.flush(llm, at)
    samples = SampleReader(at / "queue").read_samples(10_000)
    for number, sample in enumerate(samples):
        sample.save(at / f"sample-{number}.safetensors")
    controller.policy = lab.Cycle([3, 1, 4, 0])
    seen["many"] = many(llm)
    lab.leave(at, seen)


def many(llm: Any) -> list[list[int]]:
    """Return short sampled answers to one prompt."""
    return lab.tokens_of(lab.generate(llm, [[7, 11, 5]] * 500, temperature=1.0, max_tokens=3))


def parallel(at: Path) -> None:
    """The schedules that engines of one and of two data-parallel ranks are configured with, and what CUDA graphs and schedule
    vLLM would leave on a GPU; none is opened."""
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    import flashpatch
    from flashpatch.verify.probes.eagle import tiny

    speculative = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    seen = {}
    for ranks in (1, 2):
        arguments = tiny.engine_arguments(at / "target", speculative_config=speculative)
        config = EngineArgs(**arguments, data_parallel_size=ranks).create_engine_config()
        seen[str(ranks)] = config.speculative_config.num_speculative_tokens_per_batch_size
    configs = {}
    for case, arms in {"first": [], "second": [], "named": ["2_1_3", "disable"]}.items():
        flashpatch.enable("eagle", arms=arms)
        configs[case] = EngineArgs(**arguments).create_engine_config().speculative_config
    type(current_platform).is_cpu, seen["graphs"] = lambda self: False, {}
    for case, config in configs.items():
        flashpatch.enable("eagle", arms=["2_1_3", "disable"] if case == "named" else [])
        graphs = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=None,
            max_cudagraph_capture_size=None,
        )
        VllmConfig._maybe_override_dynamic_sd_cudagraph_mode(
            SimpleNamespace(
                speculative_config=config,
                compilation_config=graphs,
                scheduler_config=SimpleNamespace(max_num_seqs=4),
                use_v2_model_runner=case == "second",
            )
        )
        left = config.num_speculative_tokens_per_batch_size is not None
        seen["graphs"][case] = [graphs.cudagraph_mode.name, left, graphs.cudagraph_capture_sizes]
    lab.leave(at, seen)


def stock(at: Path) -> None:
    """Run vLLM without patches, with a fixed number of tokens."""
    llm = lab.opened(at / "target", at / "noisy", "draft_model", max_num_batched_tokens=48)
    lab.leave(at, {"many": many(llm)})


def ranks(at: Path) -> None:
    """Run two tensor-parallel ranks and an engine core, each in a process of its own, as a server does."""
    llm = lab.opened(at / "chain", at / "exact", tensor_parallel_size=2)
    seen: dict[str, Any] = {"tokens": []}
    for version in (None, 1):
        if version:
            seen["update"] = llm.collective_rpc("eagle_update_drafter", args=(str(at / "exact2"), version))
            seen["refused"] = lab.refusal(
                lambda: llm.collective_rpc("eagle_update_drafter", args=(str(at / "chain"), 2))
            )
        seen["tokens"].append(lab.tokens_of(lab.generate(llm, lab.prompts(), max_tokens=90)))
    seen["flush"] = llm.collective_rpc("eagle_flush")
    time.sleep(2.5)  # rows of the ledger are written once a second
    lab.leave(at, seen)


def layers(at: Path) -> None:
    """Capture, under EAGLE-3, the states of three layers beside the last."""
    llm = lab.opened(at / "deep", at / "eagle3", "eagle3", max_num_batched_tokens=48)
    for tokens in (30, 1):  # the second carries the final tokens of the first
        lab.generate(llm, lab.prompts(), max_tokens=tokens)
    lab.flush(llm, at)
    runner = lab.core_of(llm).model_executor.driver_worker.worker.model_runner
    lab.leave(at, {"layers": list(runner.model.model.aux_hidden_state_layers)})


def plain(at: Path) -> None:
    """Capture from an engine that does not speculate, from which a first drafter can be trained."""
    llm = lab.opened(at / "target")
    for tokens in (20, 1):
        lab.generate(llm, lab.prompts(), max_tokens=tokens)
    lab.flush(llm, at)
    lab.leave(at, {"refused": lab.refusal(lambda: llm.collective_rpc("eagle_update_drafter", args=("x", 1)))})


def acceptance(at: Path) -> None:
    """Measure the acceptance length of a given drafter (environment: DRAFTER) for the chain target."""
    llm = lab.opened(at / "chain", Path(os.environ["DRAFTER"]))
    controller = lab.controller_of(llm)
    controller.policy = lab.Cycle([3])
    lab.generate(llm, lab.prompts(), max_tokens=60)
    lab.leave(at, {"length": controller.acceptance_length})
