"""Checksums of the weights that an engine runs on, FlashPatch's and vLLM's own: of an updated one, of a fresh one, and after a write
past both."""

from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, scenario

pytestmark = pytest.mark.vllm


def checksums(a: str, b: str) -> dict[str, Any]:
    import torch

    import flashpatch

    def both(llm: Any) -> list[Any]:
        core = llm.llm_engine.engine_core.engine_core
        own = core.compute_weight_checksums() if hasattr(core, "compute_weight_checksums") else []
        return [flashpatch.checksum(llm), own, flashpatch.ledger.notes().get("witness_differs")]

    found: dict[str, Any] = {}
    with engines.open_llm(a) as llm:
        found["old"] = both(llm)
        updates.send(llm, [list(models.weights(b))])
        updates.refusal(llm)
        found["updated"] = both(llm)
        with torch.no_grad():
            engines.inner_model(llm).lm_head.weight[0, 3] += 1
        found["written to"] = both(llm)
    with engines.open_llm(b) as llm:
        found["fresh"] = both(llm)
    return found


def unknown(a: str) -> str | None:
    import flashpatch

    with engines.open_llm(a) as llm:
        return updates.error(lambda: flashpatch.checksum(llm))


def test_an_updated_engine_holds_what_a_fresh_one_does() -> None:
    a, b = (updates.checkpoint("qwen2", seed) for seed in (0, 1))
    found = scenario.run(checksums, a, b, env={"FLASHPATCH": "fp8"})
    assert found["updated"][:2] == found["fresh"][:2] and list(found["fresh"][0][0]) == ["target"]
    assert len({str(found[name][0]) for name in ("old", "updated", "written to")}) == 3
    if found["fresh"][1]:  # from vLLM 0.32 on
        *agreed, differs = (found[name][2] for name in ("old", "updated", "written to"))
        assert agreed == [None, None] and "version 1: dp0:pp0:pcp0:tp0:lm_head.weight" in differs, differs


@pytest.mark.full
def test_an_engine_without_flashpatch_is_named() -> None:
    assert "does not follow the weights" in scenario.run(unknown, updates.checkpoint("qwen2", 0))
