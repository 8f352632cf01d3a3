"""Senders that name no end, on real engines: a call that is repeated is nothing, and nothing is mixed."""

from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, oracle, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm

FP8 = dict(quantization="fp8_per_channel")


def load_one(worker: Any, name: str, tensor: Any) -> None:
    worker.model_runner.model.load_weights([(name, tensor)])


def sent_twice(a: str, b: str, c: str, kw: dict[str, Any], **options: Any) -> dict[str, list[Any]]:
    """A call per tensor, as senders do that name no end: B; C, in which a call is repeated; B, C and B again. What is answered, or
    the refusal, after each and, in the third, after each tensor."""
    found: dict[str, list[Any]] = {}
    with opened("bf16", a, options=options, **kw) as llm:

        def ask() -> None:
            answers: list[Any] = []
            problem = updates.error(lambda: answers.append(engines.greedy(llm)))
            found[sync].append(problem or answers[0])

        for sync, path in {"B": b, "C, a call repeated": c, "B again": b, "C again": c}.items():
            found[sync] = []
            for name, tensor in models.weights(path):
                again = sync == "C, a call repeated" and name == "model.layers.1.self_attn.o_proj.weight"
                for _ in range(1 + again):
                    llm.collective_rpc(load_one, args=(name, tensor))
                if sync == "B again":
                    ask()
            ask()
    return found


@pytest.mark.parametrize("kw", [{}, pytest.param(FP8, marks=pytest.mark.full)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("atomic", ["layer", pytest.param("model", marks=pytest.mark.full)])
def test_a_call_repeated_by_a_sender_without_an_end_mixes_nothing(
    runner: scenario.Runner, kw: dict[str, Any], atomic: str
) -> None:
    a, b, c = (updates.checkpoint("qwen2", seed) for seed in (0, 1, 2))
    known = {key: oracle.answers(path, **kw)["tokens"] for key, path in zip("abc", (a, b, c), strict=True)}
    got = runner(sent_twice, a, b, c, kw, atomic=atomic)
    between = [answers for sync in got.values() for answers in sync if not isinstance(answers, str)]
    assert all(answers in known.values() for answers in between), "a mixture answered"
    refused = [problem for sync in got.values() for problem in sync if isinstance(problem, str)]
    assert all("PatchError" in problem and "Send a complete update" in problem for problem in refused)
    assert len(refused) == len(got["B again"]) - 2 and all("did not come" in problem for problem in refused)
    assert {sync: answers[-1] for sync, answers in got.items()} == {
        sync: known[sync[0].lower()] for sync in got
    }
