"""Let the bandit choose the number of speculative tokens of each step, in vLLM's scheduler.

The scheduler lives in the engine core, of which a tensor-parallel engine has one: its output carries the
number to all ranks, so ranks agree by construction. vLLM's own dynamic speculation looks the number up by
batch size in a list; here an object in the list's place asks the bandit.

The number scheduled with step t is that of the drafts that step t+1 verifies. A step's tokens and seconds belong to one
arm if the step verified as many drafts as it schedules, for every request, with no prompt among them. Choices are held for a
few steps, so most steps count. Other steps teach nothing, unless prompts come with each step: after `UNTAUGHT_STEPS` steps that
taught nothing the bandit learns from the requests that decode beside a prompt."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

from flashpatch import ledger
from flashpatch.patches.eagle.bandit.arm import Arm, check_room, parse_arms
from flashpatch.patches.eagle.bandit.controller import Controller
from flashpatch.patches.eagle.bandit.policy import Policy
from flashpatch.patches.eagle.drafter_refit.acceptance import Acceptance

_MOST_REQUESTS = 1024  # batch sizes that the schedule names; larger ones have the arm of the last
UNTAUGHT_STEPS = 32  # steps in a row that teach nothing, after which a step with a prompt in it does


def arms_schedule(policy: Policy) -> list[tuple[int, int, int]]:
    """Return the schedule that opens vLLM's dynamic speculation, in turns each arm's tokens for each batch size.

    The bandit chooses in its place. vLLM records CUDA graphs for the numbers of tokens that a schedule names, each up to the
    largest batch size that has it: for an arm that is the largest that the guard lets it run, whatever ``max_num_seqs`` is."""
    steps, found = sorted({arm.steps for arm in policy.arms}), []
    for size in range(1, _MOST_REQUESTS + 1):
        fit = [one for one in steps if not one or (one + 1) * size <= policy.guard] or [0]
        found.append((size, size, fit[size % len(fit)]))
    return found


def graph_sizes(max_drafts: int, most: int) -> list[int]:
    """Return the sizes of CUDA graphs, in tokens up to ``most``, that the default arms share.

    vLLM gives a batch the next larger size that any arm has, and no full graph if its own arm has none of that size. So all but
    the smallest are multiples of the tokens that the widest arm verifies per request, which those of every arm divide."""
    width = max_drafts + 1
    requests = [1, 2, 3, 4, 6, *range(8, 32, 4), *range(32, 97, 8), *range(112, most, 16)]
    small = [size for size in range(1, width) if size <= 2 or not width % size]
    return [size for size in (*small, *(width * count for count in requests)) if size <= most]


class BanditLookup(list):
    """Answer look-ups in ``Scheduler.dynamic_sd_lookup`` with the bandit's choice for the batch size."""

    def __init__(self, controller: SpecController) -> None:
        super().__init__()
        self._controller = controller

    def __getitem__(self, batch_size: int) -> int:
        return self._controller.choose(batch_size).steps


class SpecController(Controller):
    """Choose for one scheduler, and learn from its steps.

    Args:
        policy: the bandit.
        max_drafts: speculative tokens the engine has room for.
        clock: seconds.

    Attributes:
        steps: steps that ran; counted: those that taught the bandit. Both since the start.
        acceptance: of the drafter."""

    def __init__(
        self, policy: Policy, max_drafts: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(policy, clock)
        self.max_drafts = max_drafts
        self.steps = self.counted = 0
        self.acceptance = Acceptance(max_drafts)
        self._arms = [Arm.DISABLE, *(Arm(k, 1, k + 1) for k in range(1, max_drafts + 1))]
        self._finished = 0.0  # when the step before was finished
        self._asked = max_drafts  # drafts that the last step was to make for the next one
        self._decoding = 0  # requests past their prompt when the step began
        self._taught_nothing = 0  # steps in a row

    def choose(self, batch_size: int) -> Arm:
        """Return the arm for the next step, no larger than the engine has room for.

        Prompts in the step do not count, if anything decodes: vLLM gives the number of all scheduled requests, which changes
        with each prompt."""
        return self._arms[min(super().choose(self._decoding or batch_size).steps, self.max_drafts)]

    def step_started(self, running: Iterable[Any] = ()) -> float:
        """Count the requests that decode.

        Args:
            running: vLLM's requests.

        Returns:
            The time at which the step starts."""
        self._decoding = sum(one.num_computed_tokens >= one.num_prompt_tokens for one in running)
        return self.clock()

    def drop_unasked_drafts(self, requests: Iterable[Any]) -> None:
        """Shorten the drafts of requests to the number that their last step was to make.

        A runner that drafts the maximum at every step would otherwise have all of them verified."""
        for request in requests:
            if len(request.spec_token_ids) > self._asked:
                request.spec_token_ids = request.spec_token_ids[: self._asked]

    def step_scheduled(self, scheduled: Any) -> None:
        """Note how many drafts a step's ``SchedulerOutput`` asks for."""
        if scheduled.total_num_scheduled_tokens:
            self._asked = scheduled.num_spec_tokens_to_schedule

    def step_finished(
        self, started: float, scheduled: Any, output: Any, from_history: Collection[str] = ()
    ) -> None:
        """Learn from a step whose tokens are known.

        Args:
            started: what `step_started` returned.
            scheduled: the step's ``SchedulerOutput``.
            output: the step's ``ModelRunnerOutput``.
            from_history: requests whose drafts are not the drafter's; their step belongs to no arm."""
        now = self.clock()
        started, self._finished = max(started, self._finished), now  # steps may overlap
        lengths, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        if not lengths:
            return
        self.steps += 1
        sampled = output.sampled_token_ids
        drafters = {name: draft for name, draft in drafts.items() if name not in from_history}
        if drafters:
            self._count(drafters, sampled, output.req_id_to_index)
        count = scheduled.num_spec_tokens_to_schedule
        gained = [
            len(sampled[output.req_id_to_index[name]])
            for name, length in lengths.items()
            if length == count + 1 and len(drafts.get(name, ())) == count
        ]
        self._taught_nothing += 1
        whole = len(gained) == len(lengths) == len(sampled)
        if gained and all(gained) and not from_history and (whole or self._taught_nothing > UNTAUGHT_STEPS):
            self.counted += 1
            self._taught_nothing = 0
            self.policy.update(len(gained), self._arms[count], sum(gained), now - started)
        self.report_if_due(now)

    def _count(self, drafts: Any, sampled: list[list[int]], places: Any) -> None:
        drafted = tried = accepted = 0
        for name, draft in drafts.items():
            kept = max(0, len(sampled[places[name]]) - 1)
            drafted += len(draft)
            accepted += kept
            tried += min(kept + 1, len(draft))
        self.count_drafts(len(drafts), drafted, accepted)
        self.acceptance.add(tried, accepted)

    def note(self) -> None:
        """Write choices and metrics to the ledger, and the number of steps for `flashpatch-verify --live`."""
        super().note()
        ledger.note(steps=self.steps)


controllers: weakref.WeakKeyDictionary[Any, SpecController] = weakref.WeakKeyDictionary()


def controller_of(scheduler: Any) -> SpecController | None:
    """Return the scheduler's controller; None if its speculation is not adapted."""
    return controllers.get(scheduler)


def engine_arms(asked: list[Any], max_drafts: int) -> tuple[Arm, ...]:
    """Return the arms of an engine with room for ``max_drafts`` tokens: those asked for, or by default none, all, and
    if one shares their graphs a middle one. Raises PatchError for an arm that vLLM cannot run."""
    width = max_drafts + 1
    middle = sorted(
        (part for part in range(2, width) if not width % part), key=lambda part: abs(part - width**0.5)
    )
    arms = parse_arms(asked or ["disable", *(Arm(part - 1, 1, part) for part in (*middle[:1], width))])
    check_room(arms, Arm(max_drafts, 1, width), "eagle.vllm.scheduler_init")
    return arms


def make_policy(options: Any, max_drafts: int) -> Policy:
    """Make the bandit that the family's options describe. Raises PatchError for an arm that vLLM
    cannot run."""
    return Policy(engine_arms(options["arms"], max_drafts), options["guard"])
