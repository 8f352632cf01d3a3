"""The language of `examples/eagle_cotrain.py`: what it promises to the models that learn it."""

from __future__ import annotations

import importlib.util
import random
from itertools import islice
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[2] / "examples" / "eagle" / "language.py"
_SPEC = importlib.util.spec_from_file_location("eagle_example_language", _FILE)
language = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(language)


def _texts(at: float, number: int) -> list[str]:
    drift = language.Drift()
    return [language.decode(ids) for ids in islice(drift.texts(at, 128, random.Random(0)), number)]


def test_texts_have_one_length_and_only_tokens_of_the_model():
    drift = language.Drift()
    for ids in islice(drift.texts(0.3, 128, random.Random(0)), 20):
        assert len(ids) == 128 and 3 <= min(ids) and max(ids) < language.VOCABULARY
        assert language.encode(language.decode(ids)) == ids


@pytest.mark.parametrize(("at", "dialects"), [(0.0, {0}), (0.25, {0, 1}), (0.5, {1}), (1.0, {2})])
def test_the_mixture_moves_from_the_first_dialect_to_the_last(at, dialects):
    words = [{word for kind in language.Dialect(seed)._words for word in kind} for seed in range(3)]
    found = {
        number
        for text in _texts(at, 40)
        for number, own in enumerate(words)
        if len(own & set(text.replace(".", "").split())) > 2
    }
    assert found == dialects


def test_prompts_are_the_same_for_the_same_seed():
    drift = language.Drift()
    assert drift.prompts(0.5, 4, 1) == drift.prompts(0.5, 4, 1) != drift.prompts(0.5, 4, 2)
