"""Update and refuse drafter weights in one running engine."""

import pytest
import torch
from eagle_job_common import prompts
from eagle_reference import model
from private_modes import loose

pytestmark = pytest.mark.vllm


@pytest.fixture(
    scope="module",
    params=["eagle", *(pytest.param(f"{name},eagle", marks=pytest.mark.full) for name in ("bf16", "fp8"))],
)
def run(job, request):
    return *job("refit", request.param), request.param


def _greedy(path, text: list[int], tokens: int) -> list[int]:
    for _ in range(tokens):
        with torch.no_grad():
            text = [*text, int(model(path)(torch.tensor([text])).logits[0, -1].argmax())]
    return text[-tokens:]


def test_acceptance_follows_the_weights(run):
    seen, _, _ = run
    length = seen["acceptance"]
    assert length["exact"] > 3.5
    assert length["noise"] < 1.6
    assert length["exact again"] > 3.5
    assert seen["update"] == [{"version": 1, "tensors": 9}]


def test_tokens_never_depend_on_the_drafter(run):
    seen, at, names = run
    tokens = seen["tokens"]
    assert tokens["exact"] == tokens["exact again"] == tokens["after refusals"]
    for name, path in (("exact", "chain"), ("new target", "chain2"), ("new target, new drafter", "chain2")):
        if "fp8" in names:
            break  # quantized: not the tokens of a float32 forward
        for text, got in zip(prompts(), tokens[name], strict=False):
            assert got[:20] == _greedy(at / path, text, 20), name


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("target's names", "shares with the target"),
        ("a head", "lm_head.weight, which this drafter shares"),
        ("missing", "lacks fc.weight"),
        ("shape", r"fc.weight in .* has shape \(3, 3\), not \(128, 256\)"),
        ("nan", "fc.weight in .* holds NaN"),
        ("cut", "cannot be read"),
        ("gone", "holds no safetensors"),
    ],
)
def test_a_wrong_update_is_refused_by_name_and_changes_nothing(run, what, says):
    import re

    seen, _, _ = run
    assert "eagle.vllm.worker" in seen["refused"][what] and re.search(says, seen["refused"][what])
    assert seen["acceptance"]["after refusals"] > 3.5


def test_each_update_is_recorded_with_the_acceptance_before_it(run):
    seen, at, _ = run
    noise, exact = seen["log"]
    assert (noise["version"], noise["path"]) == (1, str(at / "noise"))
    assert (exact["version"], exact["path"]) == (2, str(at / "exact2"))
    assert noise["before"] > 3.5 > 1.6 > exact["before"] >= 1
    assert seen["notes"]["eagle_drafter"]["version"] == 3
    assert seen["notes"]["eagle_drafter_loaded"]["version"] == 3


def test_what_is_shared_stays_shared_and_follows_the_target(run):
    seen, _, _ = run
    assert seen["shared"] == [{"shares_embeddings": True, "shares_head": True}] * 2
    assert seen["tokens"]["new target"] != seen["tokens"]["exact"]
    assert seen["acceptance"]["new target"] > 3.5  # exact only with the new embeddings and head
    assert seen["acceptance"]["new target, new drafter"] > 3.5
    assert seen["notes"]["eagle_policy"] == 1
    assert seen["refreshed"] == 1, "the bandit was not refreshed"


def test_disable_leaves_vllm_as_it_was(run):
    seen, _, _ = run
    assert "eagle_update_drafter" in seen["unknown then"]
    assert set(seen["lookup"]) == {3}, "what vLLM's own code makes of this schedule"
    assert seen["acceptance"]["after disable"] == 1.0  # nothing counts
    assert seen["tokens"]["after disable"] == seen["tokens"]["new target"]


def test_all_that_an_engine_left_is_private(run):
    _, at, _ = run
    assert loose(at / "ledger") == loose(at / "queue") == []
