"""Run jobs that draft from history: an engine without a drafter, and one beside a drafter."""

from pathlib import Path
from typing import Any

import eagle_job_common as lab
from eagle_job_capture import many


class Everything:
    """Stand for `StepCost` where drafts cost nothing: all guesses are verified."""

    def estimate(self, batch_size: int) -> tuple[float, float]:
        return 1.0, 0.0

    def observe(self, *args: Any) -> None:
        pass


def _steps(llm: Any, texts: list[list[int]], **changed: Any) -> tuple[list[dict[str, Any]], int]:
    """Return what was answered, and the steps that it took."""
    llm.reset_prefix_cache()
    scheduler = lab.core_of(llm).scheduler
    original, steps = scheduler.schedule, []
    scheduler.schedule = lambda *args, **kwargs: steps.append(1) or original(*args, **kwargs)
    rows = [lab.row_of(one) for one in lab.generate(llm, texts, logprobs=0, **changed)]
    del scheduler.schedule
    return rows, len(steps)


def _undrafted(llm: Any, known: list[dict[str, Any]]) -> list[list[int]]:
    """Return answers to one prompt with parameters that no draft is verified for, beside answers that are drafted."""
    asked = [{}, dict(min_p=1.0, temperature=1.0), dict(logit_bias={5: 100.0}), dict(seed=3, temperature=1.0)]
    text = dict(prompt_token_ids=known[0]["prompt"])
    return lab.tokens_of(
        llm.generate(
            [text] * len(asked), [lab.sampling(max_tokens=40, **one) for one in asked], use_tqdm=False
        )
    )


def history(at: Path) -> None:
    """Ask one engine without a drafter twice; then with chunked prompts, aborts, and drafts for every request."""
    from vllm.v1.request import RequestStatus

    from flashpatch import ledger
    from flashpatch.patches.eagle.vllm import history_drafts

    chunked = dict(max_num_batched_tokens=48, block_size=32)
    ahead = lab.refusal(lambda: lab.opened(at / "target", **chunked, async_scheduling=True))
    seen: dict[str, Any] = {"refused": ahead}
    llm = lab.opened(at / "target", **chunked)
    core = lab.core_of(llm)
    drafts = history_drafts.history_of(core.scheduler).drafts
    seen["capacity"] = drafts.capacity
    for name in ("first", "again"):
        seen[name], seen[f"{name}_steps"] = _steps(llm, lab.prompts(), temperature=0, max_tokens=40)
        drafts._cost = Everything()
    one = llm.llm_engine
    lab.begin(llm, "abort", lab.prompts()[:3], 100, steps=4)
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
    seen["after"], _ = _steps(llm, lab.prompts(), temperature=0, max_tokens=40)
    seen["sampled"], _ = _steps(llm, lab.prompts(), temperature=1.0, max_tokens=30)
    seen["undrafted"] = [_undrafted(llm, seen["first"]) for _ in range(2)]
    before = dict(drafts.metrics())
    seen["many"] = many(llm)
    seen["drafted_by_many"] = drafts.drafted - before["drafted"]
    seen["accepted_by_many"] = drafts.accepted - before["accepted"]
    seen["metrics"] = drafts.metrics()
    drafts.propose = None  # a fault
    seen["faulty"], _ = _steps(llm, lab.prompts(), temperature=0, max_tokens=40)
    seen["notes"] = ledger.notes()
    lab.leave(at, seen)


def history_beside(at: Path) -> None:
    """Ask an engine with a useless drafter twice."""
    from flashpatch import ledger
    from flashpatch.patches.eagle.vllm import history_drafts

    llm = lab.opened(at / "target", at / "noise", drafts=4, max_num_batched_tokens=48)
    found = history_drafts.history_of(lab.core_of(llm).scheduler)
    controller = lab.controller_of(llm)
    seen: dict[str, Any] = {}
    for name in ("first", "again"):
        before = (controller.counted, controller.drafted, found.drafts.drafted, found.drafts.accepted)
        seen[name], seen[f"{name}_steps"] = _steps(llm, lab.prompts(), temperature=0, max_tokens=40)
        after = (controller.counted, controller.drafted, found.drafts.drafted, found.drafts.accepted)
        seen[f"{name}_counts"] = [now - then for now, then in zip(after, before)]
        found.drafts._cost = Everything()
    seen["captured"] = "eagle_capture" in ledger.notes()
    lab.leave(at, seen)
