"""Check the ids that an engine says its sampling settings keep by their definition, and probabilities that are over them."""

import math
from collections.abc import Mapping
from typing import Any

TOKENS, WIDTH = 24, 16
OTHERS = {
    "greedy": dict(temperature=0.0, top_k=10),
    "whole": dict(temperature=1.0),
    "wider": dict(temperature=1.0, top_k=WIDTH + 1),
}
"""Settings that keep no ids, or more than are followed."""


def check(
    model: str, prompt: list[int], found: Mapping[str, Any], truncated: Mapping[str, Any], whole: bool
) -> None:
    """Check answers by the name of their settings. ``whole``: the engine takes top_p of the whole vocabulary's probabilities,
    and with the token that goes beyond it; else of those of the ``top_k``."""
    import torch
    from transformers import AutoModelForCausalLM

    from flashpatch.patches.fp8.support.kept import renormalized

    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, settings in truncated.items():
        tokens, logs, kept = (found[name][key] for key in ("tokens", "logs", "kept"))
        with torch.no_grad():
            logits = trainer(torch.tensor([[*prompt, *tokens]])).logits[0, -TOKENS - 1 : -1]
        logits /= settings["temperature"]
        assert [set(ids) for ids in kept] == [_by_definition(row, whole, **settings) for row in logits], name
        assert len(kept) == TOKENS == len(logs) and (name == "top_k" or len(set(map(len, kept))) > 1)
        rows = torch.tensor([[*ids, *[-1] * (WIDTH - len(ids))] for ids in kept])
        labels, rolled = torch.tensor(tokens), torch.tensor(logs)
        assert (renormalized(logits, labels, rows) - rolled).abs().max() < 1e-4, name  # a ratio of 1
        plain = logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
        assert (plain - rolled).max() < math.log(0.95), name  # what a trainer has without: the kept mass
    assert not any(found[name]["kept"] for name in OTHERS)


def _by_definition(
    logits: Any, whole: bool, top_k: int, top_p: float = 1.0, min_p: float = 0.0, **_: Any
) -> set[int]:
    """The ids with the ``top_k`` largest logits; of these the fewest that reach ``top_p``; none below ``min_p`` times the
    likeliest's probability."""
    values, likeliest = logits.topk(top_k)
    probs = logits.softmax(-1)[likeliest] if whole else values.softmax(-1)
    found, mass = [], 0.0
    for id, share in zip(likeliest.tolist(), probs.tolist(), strict=True):
        if (mass > top_p if whole else mass >= top_p) or share < min_p * float(probs[0]):
            break
        found.append(id)
        mass += share
    return set(found)
