"""With lm_head=float32 an engine answers as one that SGLang's own switch was given."""

from pathlib import Path

import pytest
import sglang_lab as lab

pytestmark = [pytest.mark.sglang, pytest.mark.full]


def test_the_switch_of_sglang_is_set(models: Path, tmp_path: Path) -> None:
    model = lab.checkpoint(models, "qwen2", 0)
    options = {"fp8": {"lm_head": "float32"}}
    seen = lab.together(
        tmp_path,
        dict(model=model, steps=["answers"], flashpatch="bf16", options=options),
        dict(model=model, steps=["answers"], enable_fp32_lm_head=True),
        dict(model=model, steps=["answers"]),
    )
    ours, switched, stock = (one.steps[0] for one in seen if one.done)
    assert ours == switched != stock
