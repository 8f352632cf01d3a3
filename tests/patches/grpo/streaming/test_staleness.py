"""Ages of tokens in versions of the policy, and who records the versions."""

import asyncio
import gc
from collections import Counter
from types import SimpleNamespace

from flashpatch.patches.grpo.streaming import staleness
from flashpatch.patches.grpo.streaming.staleness import KEY, ages, histogram


def test_each_token_has_the_age_of_its_part_and_without_parts_that_of_the_first():
    extra = {KEY: [[2, 5], [4, 1]]}
    assert ages({"min_global_steps": 2}, extra, step=5, tokens=6) == Counter({2: 5, 0: 1})
    assert ages({"min_global_steps": 2}, {}, step=5, tokens=6) == Counter({2: 6})
    assert ages({"min_global_steps": None}, None, step=5, tokens=6) == Counter()


def test_each_token_counts_once_if_a_loop_returns_several_outputs():
    """All turns of a request share one list, and verl keeps that of the first turn, of the last, or of each."""
    client = Client((3, 4), None, (3, 1), (4, 2), None, (5, 3))
    first, second, third = (dict(turn(client, "outputs").extra_fields) for _ in range(3))

    def found(extra, tokens):
        return ages({}, extra, step=6, tokens=tokens)

    assert [found(first, 4), found(second, 3), found(third, 3)] == [{2: 4}, {2: 1, 1: 2}, {0: 3}]
    assert found(first, 10) == found(third, 10) == {2: 5, 1: 2, 0: 3}
    assert found(first, 7) == {2: 5, 1: 2} and found(second, 6) == {2: 1, 1: 2, 0: 3}


def test_the_histogram_weighs_by_tokens():
    found = histogram([Counter({0: 5, 1: 1}), Counter({7: 2})])
    assert found["stream/staleness/0"] == 5 / 8 and found["stream/staleness/1"] == 1 / 8
    assert found["stream/staleness/4_or_more"] == 2 / 8 and found["stream/staleness/2"] == 0
    assert found["stream/staleness/max"] == 7 and found["stream/staleness/mean"] == 15 / 8
    assert histogram([]) == {} == histogram([Counter()])


class Client:
    """A client whose server is stopped by updates: each call returns the next part."""

    def __init__(self, *parts):
        self.parts = list(parts)

    async def part(self, request_id):
        version, tokens = self.parts.pop(0)
        return SimpleNamespace(token_ids=[1] * tokens, extra_fields={"global_steps": version})

    async def whole(self, request_id):
        while True:
            output = await staleness.generate_part(Client.part, self, request_id=request_id)
            if not self.parts or self.parts[0] is None:
                del self.parts[:1]
                return output


def turn(client, request):
    return asyncio.run(staleness.generate_whole(Client.whole, client, request_id=request))


def test_parts_of_a_stopped_request_and_of_later_turns_are_recorded_in_their_order():
    found = turn(Client((3, 4), (3, 2), (4, 0), (5, 1)), "one").extra_fields[KEY]
    assert found == [[3, 6], [5, 1]]
    client = Client((3, 4), None, (4, 2), (5, 1))
    # as verl's tool loop does; it keeps nothing of later turns
    kept = dict(turn(client, "many").extra_fields)
    turn(client, "many")
    assert kept[KEY] == [[3, 4], [4, 2], [5, 1]]


def test_nothing_is_kept_of_requests_that_are_gone():
    turn(Client((1, 1)), "gone")
    gc.collect()
    assert "gone" not in staleness._of_request


def test_requests_at_once_do_not_mix():
    async def both():
        clients = [Client((version, 2), (version + 1, 1)) for version in (1, 5)]
        return await asyncio.gather(
            *(
                staleness.generate_whole(Client.whole, client, request_id=str(number))
                for number, client in enumerate(clients)
            )
        )

    first, second = asyncio.run(both())
    assert first.extra_fields[KEY] == [[1, 2], [2, 1]] and second.extra_fields[KEY] == [[5, 2], [6, 1]]
