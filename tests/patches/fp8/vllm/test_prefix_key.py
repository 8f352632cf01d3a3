"""``in_flight="keep"`` beside prefix caching: no request is served from blocks of another policy, or of several."""

from typing import Any

import drafted
import pytest
import vllm_updates as updates
from vllm_lab import engines, models, oracle, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

# two blocks a prompt, of which the last is never served
CACHED = dict(enable_prefix_caching=True, block_size=32)
TOKENS = engines.TOKENS
KEEP = dict(in_flight="keep")


# --- what runs in the engine's process


class Asked:
    """Requests of one engine, by name: tokens, and how many of the prompt's came from the cache."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.ended: dict[str, list] = {}

    def add(self, name: str, prompt: Any, tokens: int = TOKENS, **more: Any) -> None:
        engines.add(self.llm, name, prompt, tokens, **more)

    def step(self, times: int = 1) -> None:
        self._note(engines.step(self.llm, times))

    def finish(self) -> None:
        self._note(engines.ended(self.llm))

    def _note(self, ended: dict[str, Any]) -> None:
        self.ended |= {name: [engines.tokens_of(one), one.num_cached_tokens] for name, one in ended.items()}

    def all_prompts(self, name: str) -> list[list]:
        """Every prompt of the laboratory, one at a time: [tokens, cached]."""
        for number, prompt in enumerate(engines.PROMPTS):
            self.add(f"{name} {number}", prompt)
            self.finish()
        return [self.ended[f"{name} {number}"] for number in range(len(engines.PROMPTS))]

    def held_back(self, name: str, prompt: Any) -> tuple:
        """A request whose blocks are hashed, and which the core's own thread has not admitted yet."""
        held: list[tuple] = []
        core = drafted.core_of(self.llm)
        core.add_request = lambda *args: held.append(args)
        self.add(name, prompt)
        del core.add_request
        return held[0]


def send(llm: Any, path: str) -> None:
    updates.send(llm, [list(models.weights(path))])


def crossing(a: str, b: str) -> dict[str, Any]:
    """One request runs while A becomes B, A, B; others wait, or are admitted late; then all is asked again."""
    import flashpatch
    from flashpatch import ledger

    flashpatch.enable("bf16", in_flight="keep")
    with engines.open_llm(a, **CACHED) as llm:
        asked = Asked(llm)
        found: dict[str, Any] = dict(a=asked.all_prompts("a"), again=asked.all_prompts("again"))
        asked.add("long", engines.PROMPTS[0], 150)
        asked.step(40)
        asked.add("waits", engines.PROMPTS[1])
        late = asked.held_back("late", engines.PROMPTS[2])
        for path in (b, a, b):
            send(llm, path)
            asked.step()
            if late:
                drafted.core_of(llm).add_request(*late)
                late = ()
            asked.step(20)
        asked.finish()
        found["waits"], found["late"] = asked.ended["waits"], asked.ended["late"]
        found["text"] = [*engines.PROMPTS[0], *asked.ended["long"][0]]
        asked.add("whole", found["text"])
        asked.finish()
        found["whole"] = asked.ended["whole"]
        found["b"], found["b again"] = asked.all_prompts("b"), asked.all_prompts("b again")
        found["notes"] = ledger.notes()
        flashpatch.disable("bf16")
        found["off"] = asked.all_prompts("off")
    return found


def plain(path: str, *prompts: list[int]) -> dict[str, Any]:
    """Stock: every prompt twice, then ``prompts``."""
    with engines.open_llm(path, **CACHED) as llm:
        asked = Asked(llm)
        found: dict[str, Any] = dict(first=asked.all_prompts("first"), again=asked.all_prompts("again"))
        for number, prompt in enumerate(prompts):
            asked.add(str(number), prompt, 64)
            asked.finish()
        found["prompts"] = [asked.ended[str(number)][0] for number in range(len(prompts))]
    return found


def preempted(a: str, b: str) -> dict[str, Any]:
    """Four requests want more KV memory than there is; when one was preempted, A becomes B."""
    with opened("bf16", a, options=KEEP, **CACHED, num_gpu_blocks_override=10) as llm:
        asked = Asked(llm)
        for number, prompt in enumerate(engines.PROMPTS):
            asked.add(str(number), prompt, 48)
        requests = drafted.core_of(llm).scheduler.requests
        while not any(one.num_preemptions for one in requests.values()):
            asked.step()
        found: dict[str, Any] = dict(
            before={
                one.request_id.partition("-")[0]: list(one.output_token_ids)
                for one in requests.values()
                if not one.num_computed_tokens
            }
        )
        send(llm, b)
        asked.finish()
        found["ended"] = asked.ended
        found["b"] = asked.all_prompts("b")
    return found


def unsalted(a: str, b: str) -> str | None:
    """Something in the process takes the salt out of the hashes."""
    from vllm.v1.core import kv_cache_utils

    original = kv_cache_utils.generate_block_hash_extra_keys
    kv_cache_utils.generate_block_hash_extra_keys = lambda request, start, end, at: (None, at)
    try:
        with opened("bf16", a, options=KEEP, **CACHED) as llm:
            engines.greedy(llm)
            send(llm, b)
            return updates.error(lambda: engines.greedy(llm))
    finally:
        kv_cache_utils.generate_block_hash_extra_keys = original


def with_drafter(at: dict[str, str], good: str, bad: str) -> dict[str, Any]:
    """While a request runs, the drafter gets another version and then the policy."""
    with drafted.opened(at["a"], good, "draft_model", dict(in_flight="keep")) as llm:
        drafted.tokens(llm)
        asked = Asked(llm)
        asked.add("runs", range(3, 30), 40)
        asked.step(3)
        llm.collective_rpc(drafted.send, args=(bad, "drafter"))
        asked.step(2)
        llm.collective_rpc(drafted.send, args=(at["b"], "target"))
        asked.finish()
        return dict(b=drafted.tokens(llm), again=drafted.tokens(llm), ended=len(asked.ended["runs"][0]))


# --- the tests


def served(found: list[list]) -> list[int]:
    return [cached for _, cached in found]


def said(found: list[list]) -> list[list[int]]:
    return [tokens for tokens, _ in found]


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        pytest.param("gemma3", marks=pytest.mark.full, id="sliding-windows"),
        pytest.param("gemma2", marks=pytest.mark.full, id="sliding-windows-and-others"),
    ],
)
def test_no_request_meets_a_block_of_another_policy(runner: scenario.Runner, family: str) -> None:
    ab = updates.checkpoint(family, 0), updates.checkpoint(family, 1)
    got = runner(crossing, *ab)
    want = runner(plain, ab[1], got["text"])
    assert got["a"] == runner(plain, ab[0])["first"]
    assert served(got["again"]) == served(want["again"]) == [32] * 4, "within a version the cache serves less"
    assert got["waits"] == [said(want["first"])[1], 0], "a waiting request was served by the old policy"
    assert got["late"] == [said(want["first"])[2], 0], "hashed before the commit, and admitted after it"
    assert got["whole"] == [want["prompts"][0][:TOKENS], 0], "blocks of three policies are shared"
    assert said(got["b"]) == said(got["b again"]) == said(want["first"])
    windows = family.startswith("gemma")  # the text's first block left its window
    assert served(got["b"]) == [0 if windows else 32, 0, 0, 0] and served(got["b again"]) == [32] * 4
    assert got["notes"]["prefix_tokens_older"] == 0 < got["notes"]["prefix_tokens"]
    assert got["off"] == [[tokens, 0] for tokens in said(want["first"])], "stock met blocks of before"


def test_a_preempted_request_goes_on_under_the_new_policy_alone(runner: scenario.Runner, ab: tuple[str, str]):
    got = runner(preempted, *ab)
    assert got["before"] and all(got["before"].values()), "nothing was preempted"
    whole = [[*engines.PROMPTS[int(name)], *tokens] for name, tokens in got["before"].items()]
    for (name, before), rest in zip(
        got["before"].items(), runner(plain, ab[1], *whole)["prompts"], strict=True
    ):
        tokens = got["ended"][name][0]
        assert tokens[: len(before)] == before and tokens[len(before) :] == rest[: 48 - len(before)]
    assert said(got["b"]) == oracle.answers(ab[1])["tokens"]


def test_a_key_that_misses_the_hashes_is_noticed(runner: scenario.Runner, ab: tuple[str, str]) -> None:
    error = runner(unsalted, *ab)
    assert error is not None, "old blocks were served"
    assert "PatchError" in error and "served 32 tokens of an older policy" in error


@pytest.mark.full
@pytest.mark.vllm(least="0.25")  # stock 0.24 verifies no drafts on a CPU
def test_a_drafter_beside_the_policy(runner: scenario.Runner) -> None:
    at = drafted.checkpoints()
    got = runner(with_drafter, at, *drafted.drafters(at, "draft_model"))
    assert got["b"] == got["again"] == runner(drafted.fresh, at["b"]) and got["ended"] == 40
