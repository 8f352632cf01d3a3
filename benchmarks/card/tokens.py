"""Measure tokens per second of engines with random weights, after prompts of each length.

Engines compile and capture as vLLM does by default. On the fake device they capture alone."""

import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import vllm
from cuda_lab import device, engine
from random_models import Size, configure
from vllm.v1.core.sched.scheduler import Scheduler

from card.table import BATCHES, CACHE, DENSE, DRAFTED, EXPERTS, SPEEDS, TOKENS, Speed

BLOCK = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128])
"""As verl's ``rollout.quantization=fp8`` opens an engine."""
ARMS = ["disable", "1_1_2", "2_1_3", "3_1_4"]
SHORT, LONG = BATCHES
ROUNDS = 3
SEEN: Counter[str] = Counter()


def measured(row: str, root: Path, _ours: bool) -> dict[str, dict[str, float]]:
    """Return by batch and prompt the tokens a second, the median of some rounds, and of a drafter which drafts were right."""
    what = SPEEDS[row]
    if what.name == "eagle":
        import flashpatch
        from flashpatch.patches.eagle.capture.sample_queue import SampleWriter

        if not what.writes:
            SampleWriter.offer = lambda writer, sample, release: release()
        # Named arms: else vLLM's first runner keeps its full graphs, and one number of drafts.
        captures = {"capture_budget": 0, "samples": str(root / f"samples-{row}")}
        flashpatch.enable("eagle", strict=True, **({"arms": ARMS} if what.drafts else captures))
    llm, found = opened(root, what), {}
    for length, batches in BATCHES.items() if not what.drafts else [(SHORT, DRAFTED)]:
        count, rounds = (TOKENS[length], ROUNDS) if length == SHORT else (TOKENS[length], 1)
        for batch in dict.fromkeys(batches):
            asked(llm, batch, length, count if length == SHORT else 1)
            SEEN.clear()
            seconds = statistics.median(asked(llm, batch, length, count) for _ in range(rounds))
            found[f"{batch} of {length}"] = {"tokens/s": batch * count / seconds}
            if what.drafts:
                found[f"{batch} of {length}"]["of its drafts right"] = SEEN["right"] / max(SEEN["drafts"], 1)
    if what.drafts and what.name:
        from flashpatch.patches.eagle.vllm import spec_controller

        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        found["steps by arm"] = spec_controller.controller_of(scheduler).policy.pulls()
    return found


def asked(llm: vllm.LLM, batch: int, length: int, count: int) -> float:
    """Return the seconds until each of some requests has its tokens."""
    most = DENSE.vocab - 3
    prompts = [[3 + (7 * row + 11 * i) % most for i in range(length)] for row in range(batch)]
    sampling = vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return time.perf_counter() - start


def opened(root: Path, what: Speed) -> vllm.LLM:
    """Open an engine; one with a drafter gets weights with which each draft is right."""
    size = EXPERTS if what.experts else DENSE
    most = LONG + TOKENS[LONG] + 8
    arguments = {**engine.ENGINE, "max_model_len": most, "max_num_seqs": max(BATCHES[SHORT])}
    arguments |= {"kv_cache_memory_bytes": CACHE, "kv_cache_dtype": what.cache}
    # More at once would take the fake device's experts minutes.
    arguments |= {"compilation_config": engine.GRAPHS} if device.IS_FAKE else {"max_num_batched_tokens": 8192}
    del arguments["max_logprobs"]
    overrides: dict[str, Any] = {"max_position_embeddings": most}
    if what.block:
        overrides["quantization_config"] = BLOCK
    if device.IS_FAKE:  # which has no stand-ins for FlashInfer's kernels, and CUTLASS's of experts
        kernels = {"linear_backend": "cutlass"} if what.block else {}
        arguments["kernel_config"] = {**kernels, "moe_backend": "triton" if what.experts else "auto"}
    if what.drafts:
        drafter = {
            "method": "eagle",
            "model": str(configured(root, size, 1)),
            "num_speculative_tokens": what.drafts,
        }
        arguments["speculative_config"] = drafter
    llm = vllm.LLM(str(configured(root, size)), load_format="dummy", hf_overrides=overrides, **arguments)
    if what.drafts:
        _make_exact(engine.worker(llm).model_runner)
        _count_drafts()
    return llm


def configured(root: Path, size: Size, layers: int = 0) -> Path:
    """Write a model's configuration, which is all that there is of it, and return its folder; ``layers``: of a drafter."""
    folder = root / f"{size.name}-{layers}"
    if not folder.exists():
        configure(size, folder)
    if layers:
        file = folder / "config.json"
        drafter = dict(architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=layers)
        file.write_text(
            json.dumps({**json.loads(file.read_text()), **drafter, "max_position_embeddings": 1 << 15})
        )
    return folder


@torch.no_grad()
def _make_exact(runner: Any) -> None:
    """Draw weights in place: layers of policy and drafter add nothing, and the drafter passes the embedding on."""
    torch.manual_seed(0)
    policy, drafter = runner.model, (getattr(runner, "speculator", None) or runner.drafter).model
    for name, parameter in (*policy.named_parameters(), *drafter.named_parameters()):
        if "norm" in name:
            parameter.fill_(1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        elif parameter.is_floating_point() and parameter.element_size() == 2:
            parameter.normal_(0, 0.5)
    hidden = drafter.model.fc.weight.shape[0]
    drafter.model.fc.weight.zero_()[:, :hidden].fill_diagonal_(1)
    drafter.model.embed_tokens.weight.copy_(policy.model.embed_tokens.weight)
    drafter.lm_head.weight.copy_(policy.lm_head.weight)


def _count_drafts() -> None:
    """Count from now on the drafts that the policy has judged."""
    judged = Scheduler.make_spec_decoding_stats

    def counted(
        self: Any, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *rest: Any, **more: Any
    ) -> Any:
        SEEN.update(drafts=num_draft_tokens, right=num_accepted_tokens)
        return judged(self, stats, num_draft_tokens, num_accepted_tokens, *rest, **more)

    Scheduler.make_spec_decoding_stats = counted
