"""Learn from a scheduler's steps, without an engine."""

from types import SimpleNamespace

import pytest
from bandit_lab import Clock

from flashpatch.errors import PatchError
from flashpatch.patches.eagle import FAMILY
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.vllm.spec_controller import (
    UNTAUGHT_STEPS,
    BanditLookup,
    SpecController,
    arms_schedule,
    graph_sizes,
    make_policy,
)

OPTIONS = {name: option.default for name, option in FAMILY.options.items()}


def step(
    controller: SpecController,
    verified: int,
    seconds: float,
    accept: int | None = None,
    batch: int = 2,
    **more,
):
    """One step of ``batch`` requests that verifies some drafts and schedules as many as the bandit
    chooses."""
    started = controller.step_started()
    count = controller.choose(batch).steps
    names = [f"r{number}" for number in range(batch)]
    got = verified if accept is None else accept
    scheduled = SimpleNamespace(
        num_scheduled_tokens={name: verified + 1 for name in names},
        scheduled_spec_decode_tokens={name: [0] * verified for name in names} if verified else {},
        num_spec_tokens_to_schedule=count,
    )
    output = SimpleNamespace(
        sampled_token_ids=[[0] * (got + 1)] * batch, req_id_to_index={name: i for i, name in enumerate(names)}
    )
    vars(scheduled).update(more)
    controller.clock.now += seconds
    controller.step_finished(started, scheduled, output)
    return count


class Fixed:
    arms, rule_name = (), "fixed"

    def __init__(self, *steps: int) -> None:
        self.queue, self.seen = list(steps), []

    def select(self, batch_size):
        k = self.queue.pop(0) if len(self.queue) > 1 else self.queue[0]
        return Arm(k, 1, k + 1) if k else Arm.DISABLE

    def update(self, *what):
        self.seen.append(what)

    def metrics(self):
        return {}

    pulls = metrics


def test_drafts_beyond_the_number_asked_for_are_dropped():
    """The list may be shared by requests, as vLLM's placeholders are."""
    controller, shared = SpecController(Fixed(3), 4, clock=Clock()), [-1] * 4
    requests = [SimpleNamespace(spec_token_ids=shared), SimpleNamespace(spec_token_ids=[7])]
    for asked, tokens, kept in ((2, 0, 4), (2, 3, 2), (0, 3, 0)):
        controller.step_scheduled(
            SimpleNamespace(num_spec_tokens_to_schedule=asked, total_num_scheduled_tokens=tokens)
        )
        controller.drop_unasked_drafts(requests)
        assert [len(one.spec_token_ids) for one in requests] == [kept, min(1, kept)]
    assert shared == [-1] * 4


def test_a_step_counts_for_the_arm_that_it_verified_and_ordered():
    controller = SpecController(Fixed(3), 4, clock=Clock())
    step(controller, 3, 2.0, accept=1)
    assert controller.policy.seen == [(2, Arm(3, 1, 4), 4, 2.0)]
    assert (controller.drafted, controller.accepted) == (6, 2)
    assert controller.acceptance_length == 2.0
    assert controller.acceptance.length == sum(0.5**k for k in range(5))


def test_disable_counts_as_an_arm():
    controller = SpecController(Fixed(0), 4, clock=Clock())
    step(controller, 0, 1.0)
    assert controller.policy.seen == [(2, Arm.DISABLE, 2, 1.0)]


@pytest.mark.parametrize(
    "mixed",
    [
        dict(num_spec_tokens_to_schedule=2),  # the next arm is another
        dict(num_scheduled_tokens={"r0": 4, "r1": 40}),  # a prompt among them
        dict(scheduled_spec_decode_tokens={"r0": [0] * 3, "r1": [0] * 2}),  # near the end of a request
    ],
)
def test_a_mixed_step_teaches_nothing(mixed):
    controller = SpecController(Fixed(3), 4, clock=Clock())
    step(controller, 3, 2.0, **mixed)
    assert controller.policy.seen == [] and controller.steps == 1


def test_prompts_in_every_step_do_not_keep_the_bandit_on_one_arm():
    """Rows of 3 decode; beside them a prompt is read in each step."""
    controller = SpecController(make_policy(OPTIONS, 4), 4, clock=Clock())
    verified, seen = 0, set()
    rows = _requests(decoding=3, prompts=1)
    for _ in range(2000):
        started = controller.step_started(rows)
        count = controller.choose(4).steps
        lengths = {f"r{n}": verified + 1 for n in range(3)} | {"prompt": 50}
        scheduled = SimpleNamespace(
            num_scheduled_tokens=lengths,
            scheduled_spec_decode_tokens={f"r{n}": [0] * verified for n in range(3)} if verified else {},
            num_spec_tokens_to_schedule=count,
        )
        output = SimpleNamespace(
            sampled_token_ids=[[0] * (verified + 1)] * 3 + [[]],
            req_id_to_index={name: at for at, name in enumerate(lengths)},
        )
        controller.clock.now += 3 + 0.2 * verified
        controller.step_finished(started, scheduled, output)
        verified = count
        seen.add(count)
    assert len(seen) > 1 and controller.counted >= 2000 // (UNTAUGHT_STEPS + 1) // 2
    late = [arm.steps for arm in controller.recent]
    assert sum(count == 4 for count in late) > 0.5 * len(late), "where every draft is accepted"


def _requests(decoding: int, prompts: int) -> list[SimpleNamespace]:
    past = SimpleNamespace(num_computed_tokens=9, num_prompt_tokens=5)
    return [past] * decoding + [SimpleNamespace(num_computed_tokens=2, num_prompt_tokens=5)] * prompts


def test_prompts_do_not_count_as_batch():
    asked = []

    class Sizes(Fixed):
        def select(self, batch_size):
            asked.append(batch_size)
            return super().select(batch_size)

    controller = SpecController(Sizes(1), 4, clock=Clock())
    for decoding, prompts in ((0, 3), (16, 0), (16, 9), (15, 40), (2, 1)):
        controller.step_started(_requests(decoding, prompts))
        BanditLookup(controller)[decoding + prompts]
    assert asked == [3, 16, 16, 15, 2]


def test_overlapping_steps_share_no_second():
    controller = SpecController(Fixed(0), 4, clock=Clock())
    first, second = controller.step_started(), controller.step_started()  # two batches in flight
    scheduled = SimpleNamespace(
        num_scheduled_tokens={"a": 1}, scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=0
    )
    output = SimpleNamespace(sampled_token_ids=[[1]], req_id_to_index={"a": 0})
    controller.clock.now = 3.0
    controller.step_finished(first, scheduled, output)
    controller.clock.now = 5.0
    controller.step_finished(second, scheduled, output)
    assert [seconds for *_, seconds in controller.policy.seen] == [3.0, 2.0]


def test_no_more_tokens_than_the_engine_has_room_for():
    assert BanditLookup(SpecController(Fixed(9), 4, clock=Clock()))[17] == 4


@pytest.mark.parametrize("pays", [True, False])
def test_the_real_bandit_ends_up_where_it_pays(pays):
    controller = SpecController(make_policy(OPTIONS, 4), 4, clock=Clock())
    verified = 0
    for _ in range(1500):
        seconds = 1 + 0.2 * verified
        verified = step(controller, verified, seconds, accept=verified if pays else 0)
    late = [arm.steps for arm in controller.recent]
    assert sum(count == (4 if pays else 0) for count in late) > 0.8 * len(late)
    assert controller.counted > 1000


def test_arms_are_what_the_engine_can_do():
    assert [str(arm) for arm in make_policy(OPTIONS, 3).arms] == ["disable", "1_1_2", "3_1_4"]
    policy = make_policy({**OPTIONS, "arms": ["2_1_3"], "guard": 9}, 3)
    assert (len(policy.arms), policy.guard) == (1, 9)
    for arm in ("4_1_5", "2_2_4"):
        with pytest.raises(PatchError, match=arm):
            make_policy({**OPTIONS, "arms": [arm]}, 3)


def test_few_arms_are_offered_as_each_has_graphs_of_its_own():
    for most in (1, 2, 3, 5, 16, 63):
        widths = {arm.steps + 1 for arm in make_policy(OPTIONS, most).arms}
        assert len(widths) <= 3 and {1, most + 1} <= widths
        assert not any((most + 1) % width for width in widths)


@pytest.mark.vllm(least="0.32")
@pytest.mark.parametrize(("drafts", "bound"), [(1, 1.2), (2, 1.2), (3, 1.5), (4, 1.2), (5, 1.5), (7, 1.5)])
def test_nearly_every_batch_of_every_arm_has_a_full_graph_and_they_are_few(drafts, bound):
    """By vLLM's own choice of graphs, at 256 requests; stock has one arm, and as many sizes."""
    policy, sizes = make_policy(OPTIONS, drafts), graph_sizes(drafts, 512)
    counts = [1, 2, 4, *range(8, 257, 8)]
    stock = {*counts, *range(256, 513, 16), *(n * (drafts + 1) for n in counts if n * (drafts + 1) <= 512)}
    alone = _full_graphs(drafts, sorted(stock), None)
    ours = _full_graphs(drafts, sizes, arms_schedule(policy))
    assert len(_captured(ours)) <= bound * len(_captured(alone))
    for width in (arm.steps + 1 for arm in policy.arms):
        batches = [n * width for n in range(1, 257) if n * width <= max(sizes)]
        fit = [[one.uniform_token_count for one in ours._candidates[tokens, 0]] for tokens in batches]
        assert sum(width in one for one in fit) > 0.9 * len(fit), (width, fit)


def _captured(manager) -> list:
    return manager._capture_descs[type(manager.cudagraph_mode).FULL]


def _full_graphs(drafts: int, sizes: list[int], schedule: list | None):
    """Return vLLM's manager of a target's graphs with nothing captured."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    speculative = SimpleNamespace(
        num_speculative_tokens_per_batch_size=schedule,
        uses_dynamic_speculative_decoding=lambda: schedule is not None,
    )
    compilation = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes))
    config = SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=drafts,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager = object.__new__(CudaGraphManager)
    vars(manager).update(compilation_config=compilation, vllm_config=config, max_num_reqs=256)
    vars(manager).update(decode_query_len=drafts + 1, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    vars(manager).update(lora_capture_cases=[0], varlen_decode=False, ubatch_runner=None)
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    return manager


@pytest.mark.vllm
def test_data_parallel_ranks_keep_one_number_of_drafts(job):
    """vLLM turns a schedule off for them from 0.26 on; 0.24 and 0.25 would take it, and the ranks' steps could differ."""
    seen, _ = job("parallel")
    assert seen["1"] == [list(row) for row in arms_schedule(make_policy(OPTIONS, 3))]
    assert seen["2"] is None


@pytest.mark.vllm
def test_the_bandit_takes_no_full_graphs_away_unless_arms_are_named(job):
    """On a GPU, by vLLM's own method, for its first and its second model runner."""
    seen, _ = job("parallel")
    assert seen["graphs"] == {
        "first": ["FULL_AND_PIECEWISE", False, None],
        "second": ["FULL_AND_PIECEWISE", True, [1, 2, 4, 8, 12, 16, 24, 32]],
        "named": ["PIECEWISE", True, None],
    }
