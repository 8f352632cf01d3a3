"""The ids that SGLang says it kept are those that its sampling settings keep, and its probabilities are over them."""

import math
from pathlib import Path
from typing import Any

import pytest
import sglang_lab as lab

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(lab.OLD, reason="before 0.5.21 none are followed")]

TOKENS, WIDTH = 24, 16
PROMPT = list(range(5, 40))
TRUNCATED = {
    "top_k": dict(temperature=1.0, top_k=10),
    "top_p": dict(temperature=0.6, top_k=WIDTH, top_p=0.6),
    "min_p": dict(temperature=0.7, top_k=12, min_p=0.1),
}
OTHERS = {
    "greedy": dict(temperature=0.0, top_k=10),
    "whole": dict(temperature=1.0),
    "wider": dict(temperature=1.0, top_k=WIDTH + 1),
}


def kept_by_definition(logits: Any, top_k: int, top_p: float = 1.0, min_p: float = 0.0, **_: Any) -> set[int]:
    """The ids with the ``top_k`` largest logits; the fewest of these whose probabilities over the whole vocabulary reach
    ``top_p``; none below ``min_p`` times the likeliest's."""
    probs, found, mass = logits.softmax(-1), [], 0.0
    for id in logits.topk(top_k).indices.tolist():
        if mass > top_p or probs[id] < min_p * probs.max():
            break
        found.append(id)
        mass += float(probs[id])
    return set(found)


def test_kept_ids_are_those_of_the_settings_and_probabilities_are_over_them(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from flashpatch.patches.fp8.support.kept import renormalized

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
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, settings in TRUNCATED.items():
        tokens, over_kept, whole, kept = (found[name][key] for key in ("ids", "over_kept", "whole", "kept"))
        with torch.no_grad():
            logits = trainer(torch.tensor([[*PROMPT, *tokens]])).logits[0, -TOKENS - 1 : -1]
        logits /= settings["temperature"]
        assert [set(ids) for ids in kept] == [kept_by_definition(row, **settings) for row in logits], name
        assert len(kept) == TOKENS == len(over_kept) and (name == "top_k" or len(set(map(len, kept))) > 1)
        rows = torch.tensor([[*ids, *[-1] * (WIDTH - len(ids))] for ids in kept])
        labels, rolled = torch.tensor(tokens), torch.tensor(over_kept)
        assert (renormalized(logits, labels, rows) - rolled).abs().max() < 1e-4, name  # a ratio of 1
        # what SGLang says without: the kept mass
        assert (torch.tensor(whole) - rolled).max() < math.log(0.95), name
    assert not any(found[name]["kept"] for name in OTHERS)
