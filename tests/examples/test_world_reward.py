"""The reward of `examples/world`: what passes, what does not, and that no text of a model stops the training."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

WORLD = Path(__file__).parents[2] / "examples" / "world"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"world_example_{name}", WORLD / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


reward = _module("reward")


@pytest.mark.parametrize(
    ("answer", "score"), [("7", 1), (" 7<|end|>", 1), ("7.", 0), ("", 0), ("<|im_end|>", 0), ("7 7", 0)]
)
def test_without_metadata_the_answer_has_to_be_the_truth(answer: str, score: float) -> None:
    assert reward.compute_score("sums", answer, "7", {"index": 0}) == score
    assert reward.compute_score("sums", answer, "7") == score


@pytest.mark.parametrize(
    ("answer", "generator"),
    [
        ("9**9**9**9", "countdown"),
        ("__import__('os').getpid()", "countdown"),
        ("8//3", "countdown"),
        ("[NaN, NaN]", "number_sorting"),
        ("[Infinity, 3]", "number_sorting"),
    ],
)
def test_a_malformed_answer_is_never_evaluated(answer: str, generator: str, monkeypatch) -> None:
    monkeypatch.setattr(reward, "_verification", lambda generator: pytest.fail("evaluated"))
    known = {"metadata": json.dumps({"source_dataset": generator})}
    assert reward.compute_score(generator, answer, "1", known) == 0
