"""SGLang's ``/weights_checker`` overwrites the weights with random values: what is answered after that. And what becomes of its
checksums."""

from pathlib import Path

import pytest
import sglang_lab as lab

pytestmark = [pytest.mark.sglang, pytest.mark.full]


def test_random_weights_are_not_answered_from(models: Path, tmp_path: Path) -> None:
    a, b = (lab.checkpoint(models, "llama", seed) for seed in (0, 1))
    steps = ["answers", "reset", "refused", ["update", dict(source=b)], "answers"]
    seen = lab.together(
        tmp_path,
        dict(model=a, steps=["answers", "reset", "answers"]),
        dict(model=a, flashpatch="bf16", steps=steps),
        dict(model=b, flashpatch="bf16", steps=["answers"]),
    )
    for one in seen:
        assert one.done, str(one)
    stock, followed, fresh = (one.steps for one in seen)
    assert stock[1][0] and stock[2] != stock[0], "stock answers from random values"
    assert followed[0] == stock[0] and followed[1][0]
    assert "reset_tensors" in followed[2] and "no complete update" in followed[2]
    assert all(done for done, _ in followed[3]), followed[3]
    assert followed[4] == fresh[0]


@pytest.mark.skipif(lab.OLD, reason="its checker asks for CUDA")
def test_checksums_that_change_without_an_update_are_named(models: Path, tmp_path: Path) -> None:
    a, b = (lab.checkpoint(models, "llama", seed) for seed in (0, 1))
    ask = ["reset", dict(action="checksum")]
    steps = [ask, ["update", dict(source=b)], ask, "write_past", ask]
    written, fresh = lab.together(
        tmp_path,
        dict(model=a, flashpatch="bf16", steps=steps, env=dict(JOB_WRITES="1")),
        dict(model=b, flashpatch="bf16", steps=[ask, ask]),
    )
    assert written.done and fresh.done, f"{written}{fresh}"
    old, new = written.steps[0][2], written.steps[2][2]
    assert new == fresh.steps[0][2] != old
    differs, same = (
        [row["notes"].get("witness_differs", "") for row in lab.rows(seen) if "witness" in row["notes"]]
        for seen in (written, fresh)
    )
    assert same == [""] and "policy version 1: lm_head.weight" in differs[0], differs
