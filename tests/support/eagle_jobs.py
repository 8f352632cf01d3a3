"""What engines are asked in a process of their own; each job writes what it saw to a directory.

python eagle_jobs.py JOB DIRECTORY [NAMES]
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

MOST = 4


class Cycle:
    """A policy that takes another number of tokens at every step, 0 among them."""

    def __init__(self, numbers: list[int]) -> None:
        from flashpatch.patches.eagle.bandit.arm import Arm

        self.arms = itertools.cycle([Arm(k, 1, k + 1) if k else Arm.DISABLE for k in numbers])
        self.updates: list[tuple[int, str, float]] = []
        self.refreshed = 0

    def select(self, batch_size: int) -> Any:
        return next(self.arms)

    def update(self, batch_size: int, arm: Any, tokens: float, seconds: float) -> None:
        self.updates.append((batch_size, str(arm), tokens))

    def metrics(self) -> dict[str, float]:
        return {}

    def refresh(self) -> None:
        self.refreshed += 1

    def state(self) -> dict[str, Any]:
        return {}


def prompts() -> list[list[int]]:
    noise = random.Random(3)
    return [[noise.randrange(3, 32) for _ in range(length)] for length in (5, 17, 33, 60, 3, 90, 12)]


def capture(at: Path) -> None:
    """Greedy and sampled requests with chunked prompts, cached prefixes, preemption and aborts, while the
    number of tokens changes at every step."""
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    from flashpatch.patches.eagle.capture.sample_queue import Reader
    from flashpatch.patches.eagle.vllm import spec_controller
    from flashpatch.verify.probes.eagle import tiny

    llm = LLM(
        **tiny.engine_arguments(
            at / "target",
            max_num_batched_tokens=48,
            block_size=32,
            speculative_config=dict(
                method="draft_model", model=str(at / "noisy"), num_speculative_tokens=MOST
            ),
        )
    )
    core = llm.llm_engine.engine_core.engine_core
    controller = spec_controller.of(core.scheduler)
    controller.policy = policy = Cycle([2, 4, 0, 1, 3])
    seen: dict[str, Any] = {"preempted": 0}
    preempt = Scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    Scheduler._preempt_request = counted

    def ask(name: str, texts: list[list[int]], **sampling: Any) -> None:
        found = llm.generate(
            [{"prompt_token_ids": text} for text in texts],
            SamplingParams(**{**dict(ignore_eos=True, detokenize=False), **sampling}),
            use_tqdm=False,
        )
        rows = []
        for one in found:
            output = one.outputs[0]
            logprobs = [step[token].logprob for step, token in zip(output.logprobs or [], output.token_ids)]
            rows.append(
                dict(
                    prompt=one.prompt_token_ids,
                    tokens=list(output.token_ids),
                    logprobs=logprobs,
                    cached=one.num_cached_tokens,
                    reason=output.finish_reason,
                )
            )
        seen[name] = rows

    texts = prompts()
    ask("greedy", texts, temperature=0, max_tokens=40, logprobs=0)
    ask("cached", [texts[5] + texts[0]], temperature=0, max_tokens=20, logprobs=0)
    ask("sampled", texts, temperature=1.0, max_tokens=30, logprobs=0)
    eos = Counter(token for row in seen["greedy"] for token in row["tokens"]).most_common(1)[0][0]
    ask("stopped", texts, temperature=0, max_tokens=40, stop_token_ids=[eos])
    ask("long", [texts[0] + texts[2]], temperature=0, max_tokens=256 - 38, logprobs=0)
    one = llm.llm_engine
    for number, text in enumerate(texts[:4]):
        one.add_request(
            f"again-{number}",
            {"prompt_token_ids": text},
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False),
        )
    for _ in range(9):
        one.step()
    core.scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts all of them
    done: dict[str, list[int]] = {}
    while one.has_unfinished_requests():
        done |= {
            output.request_id: list(output.outputs[0].token_ids) for output in one.step() if output.finished
        }
    seen["again"] = [done[f"again-{number}"] for number in range(4)]
    for number, text in enumerate(texts[:3]):
        one.add_request(
            f"abort-{number}",
            {"prompt_token_ids": text},
            SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False),
        )
    for _ in range(8):
        one.step()
    one.abort_request([f"abort-{number}" for number in range(3)])
    seen["drafted"], seen["accepted"] = controller.drafted, controller.accepted
    seen["steps"], seen["recent"] = controller.steps, list(controller.recent)
    seen["updates"] = policy.updates
    controller.policy = Cycle([0])
    ask("plain", texts, temperature=0, max_tokens=40, logprobs=0)
    [seen["flush"]] = llm.collective_rpc("eagle_flush")
    _settle(at / "ring", seen["flush"])
    samples = Reader(at / "ring").take(10_000)
    for number, sample in enumerate(samples):
        sample.save(at / f"sample-{number}.safetensors")
    controller.policy = Cycle([3, 1, 4, 0])
    seen["many"] = many(llm)
    _leave(at, seen)


def sync(at: Path) -> None:
    """New weights for the drafter of a chain target: exact, noise, refused ones; then for the target."""
    import torch
    from safetensors.torch import load_file, save_file
    from vllm import LLM, SamplingParams

    from flashpatch.patches.eagle.vllm import drafter_refit as syncs
    from flashpatch.patches.eagle.vllm import spec_controller
    from flashpatch.verify.probes.eagle import tiny

    llm = LLM(
        **tiny.engine_arguments(
            at / "chain",
            enable_prefix_caching=False,
            dtype="bfloat16" if "fp8" in sys.argv[3] else "float32",  # which vLLM's fp8 does not take
            speculative_config=dict(method="eagle", model=str(at / "exact"), num_speculative_tokens=3),
        )
    )
    core = llm.llm_engine.engine_core.engine_core
    controller = spec_controller.of(core.scheduler)
    real, controller.policy = controller.policy, Cycle([3])
    seen: dict[str, Any] = {"arms": list(map(str, real.arms)), "acceptance": {}, "tokens": {}, "refused": {}}

    def ask(name: str, tokens: int = 60) -> None:
        drafts, accepted = controller.drafts, controller.accepted
        found = llm.generate(
            [{"prompt_token_ids": text} for text in prompts()[:4]],
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        seen["tokens"][name] = [list(one.outputs[0].token_ids) for one in found]
        seen["acceptance"][name] = 1 + (controller.accepted - accepted) / max(1, controller.drafts - drafts)

    def update(path: Path, version: int) -> Any:
        return llm.collective_rpc("eagle_update_drafter", args=(str(path), version))

    def drafter() -> dict[str, Any]:
        runner = core.model_executor.driver_worker.worker.model_runner
        return dict(
            shares_embeddings=runner.drafter.model.model.embed_tokens is runner.model.model.embed_tokens,
            shares_head=runner.drafter.model.lm_head is runner.model.lm_head,
        )

    ask("exact")
    seen["update"] = update(at / "noise", 1)
    ask("noise", 12)  # fewer steps than a judgement takes
    update(at / "exact2", 2)
    ask("exact again")
    tensors = load_file(at / "exact" / "model.safetensors")
    bad = {
        "target's names": load_file(at / "chain" / "model.safetensors"),
        "a head": {**tensors, "lm_head.weight": torch.zeros(tiny.VOCAB, tiny.HIDDEN)},
        "missing": {name: tensor for name, tensor in tensors.items() if "fc" not in name},
        "shape": {**tensors, "fc.weight": torch.zeros(3, 3)},
        "nan": {**tensors, "fc.weight": tensors["fc.weight"] * float("nan")},
    }
    for name, wrong in bad.items():
        save_file(wrong, at / "bad.safetensors")
        seen["refused"][name] = _refusal(lambda: update(at / "bad.safetensors", 9))
    (at / "cut.safetensors").write_bytes((at / "bad.safetensors").read_bytes()[:-9])
    seen["refused"]["cut"] = _refusal(lambda: update(at / "cut.safetensors", 9))
    seen["refused"]["gone"] = _refusal(lambda: update(at / "gone", 9))
    ask("after refusals")
    seen["shared"] = [drafter()]
    update(at / "noise", 3)
    ask("worse", 120)  # judged while it runs
    ask("rolled back")
    seen["log"] = list(syncs.of(core).log)
    told = controller.policy.refreshed
    llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(at / "chain2")))
    seen["told of new target"] = controller.policy.refreshed - told
    ask("new target")
    update(at / "exact2", 4)
    ask("new target, new drafter")
    seen["shared"].append(drafter())
    core.scheduler.shutdown()
    seen["saved"] = (at / "bandit.json").exists()
    from flashpatch import ledger

    seen["notes"] = ledger.notes()
    import flashpatch

    seen["wrapped"] = [name for name, found in _targets().items() if found is STOCK[name]]
    flashpatch.disable()
    seen["left behind"] = [name for name, found in _targets().items() if found is not STOCK[name]]
    seen["unknown then"] = _refusal(lambda: update(at / "exact", 5))
    controller.policy = Cycle([0])  # nobody asks it any more
    ask("after disable")
    seen["lookup"] = core.scheduler.dynamic_sd_lookup
    _leave(at, seen)


STOCK: dict[str, Any] = {}


def _targets() -> dict[str, Any]:
    """What stands at each place that the family patches."""
    from importlib import import_module

    from flashpatch.patches.eagle import vllm as family

    found: dict[str, Any] = {}
    for patch in family.PATCHES:
        module, _, path = patch.targets[0].partition(":")
        if module.startswith("vllm.v1.worker.gpu."):
            continue  # the second runner needs an accelerator
        owner: Any = import_module(module)
        for part in path.split("."):
            owner, last = getattr(owner, part), owner
        found[patch.id] = vars(last)[part]
    worker = found.pop("eagle.vllm.worker")
    found["methods"] = tuple(name for name in vars(worker) if name.startswith("eagle"))
    found["methods"] = found["methods"] or None
    return found


def adapt(at: Path) -> None:
    """The real bandit, on a clock of our own: drafts pay while they are exact, and do not once they are noise."""
    from vllm import LLM, SamplingParams

    from flashpatch.patches.eagle.vllm import spec_controller
    from flashpatch.verify.probes.eagle import tiny

    llm = LLM(
        **tiny.engine_arguments(
            at / "chain",
            speculative_config=dict(method="eagle", model=str(at / "exact"), num_speculative_tokens=3),
        )
    )
    controller = spec_controller.of(llm.llm_engine.engine_core.engine_core.scheduler)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5 + 0.15 * (controller.recent[-1] if controller.recent else 0)
        return now

    controller.clock = clock
    seen: dict[str, Any] = {"recent": {}}

    def ask(name: str) -> None:
        llm.generate(
            [{"prompt_token_ids": text} for text in prompts()[:2]] * 3,
            SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        seen["recent"][name] = list(controller.recent)

    ask("exact")
    llm.collective_rpc("eagle_update_drafter", args=(str(at / "noise"), 1))
    ask("noise")
    ask("noise still")
    controller.save()
    controller.note()
    from flashpatch import ledger

    seen["notes"] = ledger.notes()
    _leave(at, seen)


def many(llm: Any) -> list[list[int]]:
    """Short sampled answers to one prompt."""
    from vllm import SamplingParams

    found = llm.generate(
        [{"prompt_token_ids": [7, 11, 5]}] * 500,
        SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    return [list(one.outputs[0].token_ids) for one in found]


def stock(at: Path) -> None:
    """vLLM alone, with a fixed number of tokens."""
    from vllm import LLM

    from flashpatch.verify.probes.eagle import tiny

    llm = LLM(
        **tiny.engine_arguments(
            at / "target",
            max_num_batched_tokens=48,
            speculative_config=dict(method="draft_model", model=str(at / "noisy"), num_speculative_tokens=3),
        )
    )
    _leave(at, {"many": many(llm)})


def ranks(at: Path) -> None:
    """Two tensor-parallel ranks and an engine core, each in a process of its own, as a server has them."""
    import time

    from vllm import LLM, SamplingParams

    from flashpatch.verify.probes.eagle import tiny

    llm = LLM(
        **tiny.engine_arguments(
            at / "chain",
            tensor_parallel_size=2,
            speculative_config=dict(method="eagle", model=str(at / "exact"), num_speculative_tokens=3),
        )
    )
    seen: dict[str, Any] = {"tokens": []}
    for version in (None, 1):
        if version:
            seen["update"] = llm.collective_rpc("eagle_update_drafter", args=(str(at / "exact2"), version))
            seen["refused"] = _refusal(
                lambda: llm.collective_rpc("eagle_update_drafter", args=(str(at / "chain"), 2))
            )
        found = llm.generate(
            [{"prompt_token_ids": text} for text in prompts()],
            SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        seen["tokens"].append([list(one.outputs[0].token_ids) for one in found])
    seen["flush"] = llm.collective_rpc("eagle_flush")
    time.sleep(2.5)  # rows of the ledger are written once a second
    _leave(at, seen)


def layers(at: Path) -> None:
    """EAGLE-3: the states of three layers are captured beside the last."""
    from vllm import LLM, SamplingParams

    from flashpatch.verify.probes.eagle import tiny

    llm = LLM(
        **tiny.engine_arguments(
            at / "deep",
            max_num_batched_tokens=48,
            speculative_config=dict(method="eagle3", model=str(at / "eagle3"), num_speculative_tokens=3),
        )
    )
    for tokens in (30, 1):  # the second takes the orders that tell of the first
        llm.generate(
            [{"prompt_token_ids": text} for text in prompts()],
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
    [counts] = llm.collective_rpc("eagle_flush")
    _settle(at / "ring", counts)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    _leave(at, {"layers": list(runner.model.model.aux_hidden_state_layers)})


def plain(at: Path) -> None:
    """An engine that does not speculate is captured too: a drafter can start from nothing."""
    from vllm import LLM, SamplingParams

    from flashpatch.verify.probes.eagle import tiny

    llm = LLM(**tiny.engine_arguments(at / "target"))
    for tokens in (20, 1):
        llm.generate(
            [{"prompt_token_ids": text} for text in prompts()],
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
    [counts] = llm.collective_rpc("eagle_flush")
    _settle(at / "ring", counts)
    _leave(at, {"refused": _refusal(lambda: llm.collective_rpc("eagle_update_drafter", args=("x", 1)))})


def _refusal(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _settle(ring: Path, counts: dict[str, Any]) -> None:
    import time

    from flashpatch.patches.eagle.capture.sample_queue import Reader

    deadline = time.monotonic() + 20
    while len(Reader(ring)) < counts["requests"] and time.monotonic() < deadline:
        time.sleep(0.05)


def _leave(at: Path, seen: dict[str, Any]) -> None:
    import psutil

    (at / "seen.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    for child in psutil.Process().children(recursive=True):  # else they would hold our output open
        child.kill()
    os._exit(0)  # all is said; vLLM's shutdown takes seconds


if __name__ == "__main__":
    import flashpatch

    if sys.argv[1] == "sync":
        STOCK.update(_targets())
    if sys.argv[1] == "stock":
        stock(Path(sys.argv[2]))
    flashpatch.enable(
        *sys.argv[3].split(","),
        strict=True,
        ring=f"{sys.argv[2]}/ring",
        rollback_steps=20,
        window=60,
        rollback=1.0
        if sys.argv[1] == "adapt"
        else 0.2,  # there the bandit has to live with a useless drafter
        state=f"{sys.argv[2]}/bandit.json",
    )
    globals()[sys.argv[1]](Path(sys.argv[2]))
