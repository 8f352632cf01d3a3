"""The ids that SGLang says it kept are those that its sampling settings keep, and its probabilities are over them."""

import math
from pathlib import Path

import kept_ids
import pytest
import sglang_lab as lab
from kept_ids import OTHERS, TOKENS, WIDTH

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(lab.OLD, reason="before 0.5.21 none are followed")]

PROMPT = list(range(5, 40))
TRUNCATED = {
    "top_k": dict(temperature=1.0, top_k=10),
    "top_p": dict(temperature=0.6, top_k=WIDTH, top_p=0.6),
    "min_p": dict(temperature=0.7, top_k=12, min_p=0.1),
}


def test_kept_ids_are_those_of_the_settings_and_probabilities_are_over_them(tmp_path: Path) -> None:
    model = lab.checkpoint(tmp_path, "qwen2", 0)
    seen = lab.run(
        tmp_path / "job",
        model=model,
        dtype="float32",
        flashpatch="bf16",
        options={"fp8": {"support": WIDTH}},
        steps=[("kept", dict(prompt=PROMPT, settings=[*TRUNCATED.values(), *OTHERS.values()], count=TOKENS))],
    )
    assert seen.done, str(seen)
    found = dict(zip([*TRUNCATED, *OTHERS], seen.steps[0], strict=True))
    kept_ids.check(model, PROMPT, found, TRUNCATED, whole=True)
    for name in TRUNCATED:  # what SGLang says without: the kept mass
        gaps = [one - other for one, other in zip(found[name]["whole"], found[name]["logs"], strict=True)]
        assert max(gaps) < math.log(0.95), name
