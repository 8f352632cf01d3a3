"""The number of speculative tokens of each step, chosen by the bandit in the scheduler.

The scheduler lives in the engine core, of which a tensor-parallel engine has one: its orders carry the number
to all ranks, so ranks agree by construction. vLLM's own dynamic speculation looks the number up by batch size
in a list; here the list asks the bandit.

An order of step t makes the drafts that step t+1 verifies. A step's tokens and seconds belong to one arm only
where it verified as many drafts as it ordered, for every request, with no prompt among them; other steps
teach nothing. Choices are held for a few steps, so most steps count.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.patches.eagle.bandit import persistence
from flashpatch.patches.eagle.drafter_refit.acceptance_check import Tally, Trial
from flashpatch.patches.eagle.vllm.targets import SCHEDULER, TEXT
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.eagle")

BEGAN = "flashpatch_began"
"""On a ``SchedulerOutput``: when it was begun."""

ANY_BATCH = 1 << 30
HOLD = 4  # steps for which a choice is kept at least: the first of them verifies the drafts of the one before
_LARGE = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of tokens offered as arms where none are named
_NOTED = 1.0  # seconds between two notes to the ledger
_SAVED = 10.0  # seconds between two saves of what was learned


def schedule(most: int) -> list[tuple[int, int, int]]:
    """The schedule that opens vLLM's dynamic speculation: ``most`` tokens at any batch size."""
    return [(1, ANY_BATCH, most)]


class Choice(list):
    """In the place of ``Scheduler.dynamic_sd_lookup``: asked for a batch size, it asks the controller."""

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self._choose = controller.choose

    def __getitem__(self, batch_size: int) -> int:
        return self._choose(batch_size)


class Controller:
    """Chooses for one scheduler, and learns from its steps.

    Args:
        policy: a `flashpatch.patches.eagle.bandit.policy.Policy`.
        most: speculative tokens the engine has room for.
        state: file that keeps what the policy learned, or None.
        clock: seconds.

    Attributes:
        drafts: requests' steps in which drafts were verified; drafted, accepted: tokens. All since the start.
        listeners: called with (batch size, arm, tokens, seconds) of every step that counts.
        pending: to be done once, before the next step is scheduled, or when that is refused, once all requests
            are over.
        trial: follows acceptance from the first step on, or None.
        on_drafts: called with the `Tally` of every step that verified drafts.
    """

    def __init__(
        self,
        policy: Any,
        most: int,
        state: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        from flashpatch.patches.eagle.bandit.arm import Arm

        self.policy, self.most, self.clock = policy, most, clock
        self.drafts = self.drafted = self.accepted = 0
        self.steps = self.counted = 0
        self.listeners: list[Callable[[int, Any, int, float], None]] = []
        self.pending: Callable[[], None] | None = None
        self.trial: Trial | None = None
        self.on_drafts: Callable[[Tally], Any] | None = None
        self._refused: Callable[[], None] | None = None
        self.recent: deque[int] = deque(maxlen=64)
        self._arms = [Arm.DISABLE, *(Arm(k, 1, k + 1) for k in range(1, most + 1))]
        self._ended = 0.0
        self._noted = 0.0
        self._saved = clock()
        self._state = state
        if state is not None:
            ledger.note(eagle_state=persistence.restore(policy, state))

    def choose(self, batch_size: int) -> int:
        """Speculative tokens for the next step."""
        tokens = min(self.policy.select(batch_size).steps, self.most)
        self.recent.append(tokens)
        return tokens

    def begin(self) -> float:
        """A step is about to be scheduled; the time."""
        if self.pending is not None and self.pending != self._refused:
            self._attempt("it waits until all requests are over")
        return self.clock()

    def idle(self) -> None:
        """All requests are over."""
        if self.pending is not None:
            self._attempt("it is given up")
            self.pending = self._refused = None

    def _attempt(self, otherwise: str) -> None:
        self._refused = self.pending
        try:
            self.pending()
        except Exception as error:  # of any worker; the engine goes on with the drafter it has
            logger.warning("the drafter's last good weights cannot be loaded, %s: %s", otherwise, error)
            ledger.note(eagle_rollback=f"{otherwise}: {error}")
        else:
            self.pending = self._refused = None

    def end(self, began: float, orders: Any, output: Any) -> None:
        """A step's tokens are known.

        Args:
            began: what `begin` gave.
            orders: the step's ``SchedulerOutput``.
            output: the step's ``ModelRunnerOutput``.
        """
        now = self.clock()
        began, self._ended = max(began, self._ended), now  # steps may overlap
        lengths, drafts = orders.num_scheduled_tokens, orders.scheduled_spec_decode_tokens
        if not lengths:
            return
        self.steps += 1
        sampled = output.sampled_token_ids
        if drafts:
            self._count(drafts, sampled, output.req_id_to_index)
        tokens = sum(map(len, sampled))
        count = orders.num_spec_tokens_to_schedule
        plain = all(
            length == count + 1 and len(drafts.get(name, ())) == count for name, length in lengths.items()
        )
        if plain and all(sampled) and len(sampled) == len(lengths):
            self.counted += 1
            arm = self._arms[count]
            self.policy.update(len(lengths), arm, tokens, now - began)
            for listener in self.listeners:
                listener(len(lengths), arm, tokens, now - began)
        if now - self._noted > _NOTED:
            self.note()
        if now - self._saved > _SAVED:
            self.save()

    def _count(self, drafts: Any, sampled: list[list[int]], places: Any) -> None:
        tally = Tally()
        for name, draft in drafts.items():
            got = max(0, len(sampled[places[name]]) - 1)
            self.drafted += len(draft)
            tally.accepted += got
            tally.tried += min(got + 1, len(draft))
        self.drafts += len(drafts)
        self.accepted += tally.accepted
        if self.on_drafts is not None:
            self.on_drafts(tally)

    def note(self) -> None:
        """Write decisions and metrics to the ledger."""
        self._noted = self.clock()
        ledger.note(
            steps=self.steps,
            eagle_speculation={
                "steps": self.steps,
                "counted": self.counted,
                "drafted": self.drafted,
                "accepted": self.accepted,
                "acceptance_length": self.acceptance,
                "recent": list(self.recent)[-16:],
                **self.policy.metrics(),
            },
        )

    @property
    def acceptance(self) -> float:
        """Mean tokens of a request's speculative step, the target's own included; 0 before the first."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    def save(self) -> None:
        """Write what was learned to the state file, if there is one."""
        if self._state is not None:
            self._saved = self.clock()
            persistence.save(self.policy, self._state)


_controllers: weakref.WeakKeyDictionary[Any, Controller] = weakref.WeakKeyDictionary()


def of(scheduler: Any) -> Controller | None:
    """The scheduler's controller, if its speculation is adapted."""
    return _controllers.get(scheduler)


def policy(options: Any, most: int) -> Any:
    """The bandit that the family's options describe.

    Raises:
        PatchError: an unknown rule, or an arm that vLLM cannot run.
    """
    from flashpatch.patches.eagle.bandit.arm import Arm, parse_arms
    from flashpatch.patches.eagle.bandit.policy import Policy

    arms = parse_arms(options["arms"] or ["disable", *(Arm(k, 1, k + 1) for k in _LARGE if k <= most)])
    for arm in arms:
        if arm.topk > 1 or arm.steps > most:
            raise PatchError(
                f"vLLM cannot run arm {arm}: it drafts chains of at most num_speculative_tokens={most}.",
                patch="eagle.vllm.scheduler_init",
                advice="Name arms such as 3_1_4, or raise num_speculative_tokens.",
            )
    described = dict(
        rule=options["rule"] or None, guard=options["guard"], window=options["window"], seed=options["seed"]
    )
    found = Policy(arms, **described)
    return found if found.hold >= HOLD or len(arms) == 1 else Policy(arms, hold=HOLD, **described)


def on_config(original, self, *args: Any, **kwargs: Any):
    """Around ``EngineArgs.create_speculative_config``: open vLLM's dynamic speculation, unless the user did.

    vLLM then turns full CUDA graphs to piecewise where its runner needs that, and dynamic speculation off
    again under data parallelism, whose ranks must not differ.
    """
    config = original(self, *args, **kwargs)
    if config is None or not engine.options("eagle")["adapt"] or config.num_speculative_tokens_per_batch_size:
        return config
    follows = config.method == "ngram" or config.use_eagle() or config.uses_draft_model()
    if follows and not config.use_dflash() and not getattr(config, "parallel_drafting", False):
        policy(engine.options("eagle"), config.num_speculative_tokens)  # complain early
        config.num_speculative_tokens_per_batch_size = schedule(config.num_speculative_tokens)
    return config


def on_scheduler(original, self, *args: Any, **kwargs: Any):
    """Around ``Scheduler.__init__``."""
    original(self, *args, **kwargs)
    ledger.role("engine-core")
    config, options = self.vllm_config.speculative_config, engine.options("eagle")
    if config is None or not options["adapt"]:
        return
    if config.num_speculative_tokens_per_batch_size != schedule(self.num_spec_tokens):
        ledger.note(
            eagle_speculation="left alone: its method, data parallelism or a schedule of the user's own"
        )
        return
    state = Path(options["state"]).expanduser() if options["state"] else None
    controller = Controller(policy(options, self.num_spec_tokens), self.num_spec_tokens, state)
    controller.trial = Trial(controller.most, options["rollback_steps"], options["rollback"])
    controller.on_drafts = controller.trial.step
    _controllers[self] = controller
    self.dynamic_sd_lookup = Choice(controller)
    controller.note()


def on_output(original, self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any):
    """Around ``Scheduler.update_from_output``."""
    result = original(self, scheduler_output, model_runner_output, *args, **kwargs)
    controller = _controllers.get(self)
    if controller is not None:
        began = getattr(scheduler_output, BEGAN, None)
        if began is not None:
            controller.end(began, scheduler_output, model_runner_output)
        if controller.pending is not None and not self.has_unfinished_requests():
            controller.idle()
    return result


def on_shutdown(original, self, *args: Any, **kwargs: Any):
    """Around ``Scheduler.shutdown``: keep what was learned."""
    controller = _controllers.get(self)
    if controller is not None:
        controller.note()
        controller.save()
    return original(self, *args, **kwargs)


def undo(site: Any) -> None:
    """Give every scheduler a list again that vLLM's own code would have made."""
    for scheduler, controller in list(_controllers.items()):
        scheduler.dynamic_sd_lookup = [controller.most] * (scheduler.scheduler_config.max_num_seqs + 1)
    _controllers.clear()
    site.unwrap()


_WHY = "vLLM's number of speculative tokens is fixed, or a table by batch size that is blind to acceptance."

DYNAMIC = Patch(
    id="eagle.vllm.create_speculative_config",
    targets=("vllm.engine.arg_utils:EngineArgs.create_speculative_config",),
    wrapper=on_config,
    contract=Contract(
        exists=(
            "vllm.config.speculative:SpeculativeConfig.num_speculative_tokens_per_batch_size",
            "vllm.config.speculative:SpeculativeConfig.use_eagle",
            "vllm.config.speculative:SpeculativeConfig.uses_draft_model",
            "vllm.config.speculative:SpeculativeConfig.use_dflash",
            "vllm.config.vllm:VllmConfig._maybe_disable_dynamic_sd_for_data_parallel",
            "vllm.v1.spec_decode.dynamic.utils:build_dynamic_sd_schedule_lookup",
        ),
    ),
    evidence="optional",
    why=_WHY,
    how="Opens vLLM's dynamic speculation with one entry for all batch sizes.",
    **{**TEXT, "scope": frozenset({"driver"})},
)

CHOOSE = Patch(
    id="eagle.vllm.scheduler_init",
    targets=(f"{SCHEDULER}.__init__",),
    wrapper=on_scheduler,
    undo=undo,
    contract=Contract(mentions=("self.dynamic_sd_lookup", "self.num_spec_tokens")),
    evidence="install",
    needs=("eagle.vllm.create_speculative_config", "eagle.vllm.schedule", "eagle.vllm.update_from_output"),
    why=_WHY,
    how="Puts in the table's place an object that asks the bandit.",
    **TEXT,
)

REWARD = Patch(
    id="eagle.vllm.update_from_output",
    targets=(f"{SCHEDULER}.update_from_output",),
    wrapper=on_output,
    contract=Contract(
        params=("scheduler_output", "model_runner_output"),
        mentions=("model_runner_output.sampled_token_ids", "self.make_spec_decoding_stats"),
        exists=(
            "vllm.v1.core.sched.output:SchedulerOutput.scheduled_spec_decode_tokens",
            "vllm.v1.core.sched.output:SchedulerOutput.num_spec_tokens_to_schedule",
        ),
    ),
    evidence="step",
    why="What an arm is worth is what its steps gave in the time they took.",
    how="Counts the tokens of each step and its wall time.",
    **TEXT,
)

SHUTDOWN = Patch(
    id="eagle.vllm.scheduler_shutdown",
    targets=(f"{SCHEDULER}.shutdown",),
    wrapper=on_shutdown,
    evidence="optional",
    needs=("eagle.vllm.scheduler_init",),
    why="What the bandit learned is worth keeping for the next run.",
    how="Saves it when the engine ends.",
    **TEXT,
)

PATCHES = (DYNAMIC, CHOOSE, REWARD, SHUTDOWN)
