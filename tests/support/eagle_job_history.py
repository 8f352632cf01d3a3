"""Run jobs that draft from history: an engine without a drafter, and one beside a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_job_capture import many
from eagle_job_common import leave, prompts, refusal


class Everything:
    """Stand for `StepCost` where drafts cost nothing: all guesses are verified."""

    def estimate(self, batch_size: int) -> tuple[float, float]:
        return 1.0, 0.0

    def observe(self, *args: Any) -> None:
        pass


def _steps(llm: Any, texts: list[list[int]], **sampling: Any) -> tuple[list[dict[str, Any]], int]:
    """Return what was answered, and the steps that it took."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original, steps = scheduler.schedule, []
    scheduler.schedule = lambda *args, **kwargs: steps.append(1) or original(*args, **kwargs)
    found = llm.generate(
        [{"prompt_token_ids": text} for text in texts],
        SamplingParams(**{**dict(ignore_eos=True, detokenize=False, logprobs=0), **sampling}),
        use_tqdm=False,
    )
    del scheduler.schedule
    rows = []
    for one in found:
        output = one.outputs[0]
        logprobs = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids)]
        rows.append(dict(prompt=one.prompt_token_ids, tokens=list(output.token_ids), logprobs=logprobs))
    return rows, len(steps)


def history(at: Path) -> None:
    """Ask one engine without a drafter twice; then with chunked prompts, aborts, and drafts for every request."""
    from vllm import LLM, SamplingParams
    from vllm.v1.request import RequestStatus

    from flashpatch import ledger
    from flashpatch.patches.eagle.vllm import history_drafts
    from flashpatch.verify.probes.eagle import tiny

    arguments = tiny.engine_arguments(at / "target", max_num_batched_tokens=48, block_size=32)
    seen: dict[str, Any] = {"refused": refusal(lambda: LLM(**arguments, async_scheduling=True))}
    llm = LLM(**arguments)
    core = llm.llm_engine.engine_core.engine_core
    drafts = history_drafts.history_of(core.scheduler).drafts
    for name in ("first", "again"):
        seen[name], seen[f"{name}_steps"] = _steps(llm, prompts(), temperature=0, max_tokens=40)
        drafts._cost = Everything()
    one = llm.llm_engine
    for number, text in enumerate(prompts()[:3]):
        one.add_request(
            f"abort-{number}",
            {"prompt_token_ids": text},
            SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False),
        )
    for _ in range(4):
        one.step()
    abort = core._process_aborts_queue  # what vLLM calls between the model's step and the scheduler's update
    [inside] = [name for name in core.scheduler.requests if name.startswith("abort-0")]

    def abort_in_step() -> None:
        core._process_aborts_queue = abort
        core.scheduler.finish_requests([inside], RequestStatus.FINISHED_ABORTED)

    core._process_aborts_queue = abort_in_step
    one.step()
    seen["aborted_in_step"] = inside not in core.scheduler.requests
    one.abort_request([f"abort-{number}" for number in range(3)])
    core.scheduler.reset_prefix_cache(reset_running_requests=True)
    seen["after"], _ = _steps(llm, prompts(), temperature=0, max_tokens=40)
    seen["sampled"], _ = _steps(llm, prompts(), temperature=1.0, max_tokens=30)
    before = dict(drafts.metrics())
    seen["many"] = many(llm)
    seen["drafted_by_many"] = drafts.drafted - before["drafted"]
    seen["accepted_by_many"] = drafts.accepted - before["accepted"]
    seen["metrics"] = drafts.metrics()
    drafts.propose = None  # a fault
    seen["faulty"], _ = _steps(llm, prompts(), temperature=0, max_tokens=40)
    seen["off"] = ledger.notes().get("eagle_history_off")
    leave(at, seen)


def history_beside(at: Path) -> None:
    """Ask an engine with a useless drafter twice."""
    from vllm import LLM

    from flashpatch.patches.eagle.vllm import history_drafts, spec_controller
    from flashpatch.verify.probes.eagle import tiny

    llm = LLM(
        **tiny.engine_arguments(
            at / "target",
            max_num_batched_tokens=48,
            speculative_config=dict(method="eagle", model=str(at / "noise"), num_speculative_tokens=4),
        )
    )
    core = llm.llm_engine.engine_core.engine_core
    found = history_drafts.history_of(core.scheduler)
    controller = spec_controller.controller_of(core.scheduler)
    seen: dict[str, Any] = {}
    for name in ("first", "again"):
        before = (controller.counted, controller.drafted, found.drafts.drafted, found.drafts.accepted)
        seen[name], seen[f"{name}_steps"] = _steps(llm, prompts(), temperature=0, max_tokens=40)
        after = (controller.counted, controller.drafted, found.drafts.drafted, found.drafts.accepted)
        seen[f"{name}_counts"] = [now - then for now, then in zip(after, before)]
        found.drafts._cost = Everything()
    leave(at, seen)
