"""Weights whose memory is released: the policy, a drafter, and updates in between, on real engines.

SGLang's memory saver is that of `sglang_saver`: released memory holds garbage, and what is written into it is lost."""

from pathlib import Path
from typing import Any

import eagle_engines as eagles
import pytest
import sglang_lab as lab

pytestmark = pytest.mark.sglang

SAVER = dict(env={"STANDIN_AMX": "1", "JOB_SAVER": "1"}, enable_memory_saver=True)
ASK = ["tokens", dict(count=24)]
WEIGHTS = dict(tags=["weights"])


def drafting(models: Path, **more: Any) -> tuple[dict[str, Any], str]:
    """A job whose drafter is right at every token, and another target."""
    target, other = (eagles.target(models, 0.0, seed) for seed in (0, 1))
    drafter = eagles.drafter(models, target, "right", exact=True)
    steps = [
        ASK,
        ["release", WEIGHTS],
        ["resume", WEIGHTS],
        ["update", dict(source=other, selector="target")],
        "refused",
        ["update", dict(source=target, selector="target")],
        ASK,
        ["update", dict(source=drafter, selector="draft")],
    ]
    job = dict(model=target, steps=steps, speculative_draft_model_path=drafter)
    return {**eagles.SPECULATIVE, **SAVER, **job, **more}, other


@pytest.mark.sglang(least="0.5.21")  # before, SGLang speculates with Triton's kernels, which no CPU runs
@pytest.mark.parametrize(
    "name,dtype", [("bf16", "float32"), pytest.param("fp8", "bfloat16", marks=pytest.mark.full)]
)
def test_a_drafter_is_there_after_a_release(name: str, dtype: str, models: Path, tmp_path: Path) -> None:
    """Whether SGLang keeps it (``enable_draft_weights_cpu_backup``) or FlashPatch: no update of the policy brings it."""
    kept, _ = drafting(models, flashpatch=name, dtype=dtype, enable_draft_weights_cpu_backup=True)
    copied, _ = drafting(models, flashpatch=name, dtype=dtype)
    for one in lab.together(tmp_path, kept, copied):
        assert one.done, str(one)
        before, _, _, update, refused, back, after, own = one.steps
        assert all(done for done, _ in update + back + own), update + back + own
        [notes] = [row["notes"] for row in lab.rows(one) if "drafter_version" in row["notes"]]
        assert (notes["policy_version"], notes["drafter_version"]) == (2, 1)
        assert refused == ""
        assert before == after, "another answer, or another acceptance, after release and update"
        assert before[0]["accept"] > 2, "the drafter was of no use from the beginning: nothing is shown"


def test_no_update_while_the_memory_is_away(models: Path, tmp_path: Path) -> None:
    a, b = (lab.checkpoint(models, "llama", seed) for seed in (0, 1))
    away = [
        ["begin", {}],
        ["bucket", dict(source=b, only="layers.0")],
        ["release", WEIGHTS],
        ["bucket", dict(source=b, only="layers.1")],
        "end",
        ["resume", WEIGHTS],
    ]
    lost = [
        *away,
        "end",
        "refused",
        ["release", WEIGHTS],
        ["begin", {}],
        ["disk", dict(source=b)],
        ["resume", WEIGHTS],
        ["update", dict(source=b)],
        "answers",
    ]
    backup = [
        *("answers", *away, "answers"),
        *(["bucket", dict(source=b, without="layers.0")], "end", "answers"),
    ]
    job = dict(model=a, flashpatch="fp8", **SAVER)
    model = dict(job, enable_weights_cpu_backup=True, options={"fp8": dict(atomic="model")})
    seen = lab.together(
        tmp_path, dict(job, steps=lost), dict(model, steps=backup), dict(job, model=b, steps=["answers"])
    )
    for one in seen:
        assert one.done, str(one)
    gone, kept, fresh = (one.steps for one in seen)
    assert not gone[3][0] and not gone[4][0] and "resume it and end the update again" in gone[4][1]
    assert not gone[6][0] and "memory of its weights is away" in gone[6][1]  # what failed first in it
    assert "discarded" in gone[7]
    for answer in gone[9], gone[10]:
        assert not answer[0] and "memory of its weights is away" in answer[1]
    assert all(done for done, _ in gone[12]), gone[12]
    assert gone[13] == fresh[0]
    assert not kept[4][0] and "memory of its weights is away" in kept[4][1]
    assert not kept[5][0] and "resume it" in kept[5][1]
    assert kept[7] == kept[0], "the old policy, which SGLang kept, until the commit"
    assert kept[9][0], kept[9]
    assert kept[10] == fresh[0]
