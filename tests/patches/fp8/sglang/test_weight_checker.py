"""SGLang's ``/weights_checker`` overwrites the weights with random values: what is answered after that."""

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
