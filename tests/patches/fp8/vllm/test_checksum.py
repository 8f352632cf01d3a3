"""Checksums of the weights that an engine runs on: of an updated one, of a fresh one, and after a write past both."""

from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, scenario

pytestmark = pytest.mark.vllm


def checksums(a: str, b: str) -> dict[str, Any]:
    import torch

    import flashpatch

    found: dict[str, Any] = {}
    with engines.open_llm(a) as llm:
        found["old"] = flashpatch.checksum(llm)
        updates.send(llm, [list(models.weights(b))])
        updates.refusal(llm)
        found["updated"] = flashpatch.checksum(llm)
        with torch.no_grad():
            engines.inner_model(llm).lm_head.weight[0, 3] += 1
        found["written to"] = flashpatch.checksum(llm)
    with engines.open_llm(b) as llm:
        found["fresh"] = flashpatch.checksum(llm)
    return found


def unknown(a: str) -> str | None:
    import flashpatch

    with engines.open_llm(a) as llm:
        return updates.error(lambda: flashpatch.checksum(llm))


def test_an_updated_engine_holds_what_a_fresh_one_does() -> None:
    a, b = (updates.checkpoint("qwen2", seed) for seed in (0, 1))
    found = scenario.run(checksums, a, b, env={"FLASHPATCH": "fp8"})
    assert found["updated"] == found["fresh"] and list(found["fresh"][0]) == ["target"]
    assert len({str(found[name]) for name in ("old", "updated", "written to")}) == 3


@pytest.mark.full
def test_an_engine_without_flashpatch_is_named() -> None:
    assert "does not follow the weights" in scenario.run(unknown, updates.checkpoint("qwen2", 0))
