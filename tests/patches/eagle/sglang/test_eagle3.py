"""EAGLE-3 on a real SGLang engine: the target's answers, drafters by path, and nothing captured half."""

from pathlib import Path
from typing import Any

import eagle_engines as eagles
import pytest

from flashpatch.patches.eagle.drafter_refit.commands import UPDATE

pytestmark = pytest.mark.sglang(least="0.5.20")

lab = eagles.lab

SHARED = [5, 9, 4, 22, 17, 3, 30, 12, 8, 19, 27, 6, 14, 2, 25, 11]
PROMPTS = [[*SHARED, 3, 4, 5], [7, 28, 13, 1] * 5, [7, 8, 9]]
AGAIN = [[*SHARED, 6, 7]]
TREE = dict(speculative_eagle_topk=2, speculative_num_draft_tokens=6)
CHAIN = {**eagles.SPECULATIVE, "speculative_algorithm": "EAGLE3", "disable_radix_cache": False}


def ids(step: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["ids"] for answer in step]


@pytest.fixture(scope="module")
def seen(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Engines without speculation, with chains, and with trees; those with get another drafter at the end."""
    target, follows = eagles.target3(models), eagles.drafter3(models, "follows3", follows=True)
    other = eagles.drafter3(models, "random3", follows=False)
    asked = [["tokens", dict(count=20, prompts=PROMPTS)], ["tokens", dict(count=8, prompts=AGAIN)]]
    update = ["eagle", dict(method=UPDATE, given=[str(other), 7])]
    then = [["pause", dict(seconds=1.5)], update, ["tokens", dict(count=20, prompts=PROMPTS)]]
    plain = {**eagles.PLAIN, "disable_radix_cache": False}
    drafting = dict(
        model=str(target),
        speculative_draft_model_path=str(follows),
        steps=[*asked, *then],
        chunked_prefill_size=16,
        flashpatch="eagle",
        options={"eagle": dict(samples="{where}/queue", adapt=False)},
    )
    found = lab.together(
        tmp_path_factory.mktemp("eagle3"),
        dict(model=str(target), steps=asked, **plain),
        dict(drafting, **CHAIN),
        dict(drafting, **{**CHAIN, **TREE}),
    )
    assert all(one.done for one in found), str(next(one for one in found if not one.done))
    return found


def test_tokens_are_the_targets_and_drafts_are_accepted(seen: Any) -> None:
    alone, *drafting = seen
    for one in drafting:
        assert [ids(step) for step in one.steps[:2]] == [ids(step) for step in alone.steps]
        assert max(answer["accept"] for answer in one.steps[0]) > 1.5
        assert not (one.where / "queue").exists()


def test_another_eagle3_drafter_is_loaded_by_path(seen: Any) -> None:
    """With its head, which an EAGLE-3 drafter does not share with the target."""
    for one in seen[1:]:
        [taken], after = one.steps[3:]
        assert taken["version"] == 7
        assert ids(after) == ids(one.steps[0])
        means = [sum(a["accept"] for a in step) / len(step) for step in (one.steps[0], after)]
        assert means[1] < means[0] - 0.3, means
