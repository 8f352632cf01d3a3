"""What a trainer's own ways to compute do to its model's numbers; the engine is the same model in bf16."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm_lab import models

from flashpatch.verify.exact.calls import recorded
from flashpatch.verify.exact.certificate import Cause
from flashpatch.verify.exact.command import tokens
from flashpatch.verify.exact.compare import kept_kl, logits, mean_kl
from flashpatch.verify.exact.engine import Pass
from flashpatch.verify.exact.routers import following, logits_of
from flashpatch.verify.exact.trainer import measured
from flashpatch.verify.exact.verl_job import Trainer


def causes_of(
    path: Path, trainer: Trainer = Trainer(), change: Callable[[Any], None] = lambda engine: None
) -> dict[str, Cause]:
    """By name; ``change`` does something to the engine."""

    def load(dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager"
        )
        return model.eval()

    ids, _ = tokens(str(path), "")
    engine = load(torch.bfloat16)
    change(engine)
    with recorded(engine) as calls:
        given = logits(engine, ids)
    found = measured(load, ids, Pass(calls, given, ""), trainer)
    return {cause.name: cause for cause in found}


WAYS = ("trainer's attention", "padding", "position ids", "remove padding")


def test_a_trainer_that_computes_the_same_has_no_share(tmp_path: Path) -> None:
    found = causes_of(models.checkpoint(tmp_path, "llama"))
    assert found["trainer's dtype"].share == 1  # what the engine computes in, here
    assert all(abs(found[name].share) < 0.01 for name in WAYS), found
    assert set(found) == {"trainer's dtype", *WAYS}


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("gemma2", "trainer's attention"),  # torch's leaves the cap on scores away
        ("mamba2", "remove padding"),  # its state goes on from one sequence of a row to the next
        ("gpt2", "position ids"),  # learned for places in a row, padding or not
    ],
)
def test_one_that_does_not_is_measured(tmp_path: Path, family: str, fault: str) -> None:
    path = tmp_path / family
    if family == "gpt2":
        small = transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3)
        transformers.GPT2LMHeadModel(small).save_pretrained(path)
    else:
        path = models.checkpoint(tmp_path, family)
    found = causes_of(path)
    assert found[fault].share < -10 and found[fault].part.startswith("gap x "), found[fault]
    assert all(abs(found[name].share) < 0.1 for name in WAYS if name != fault and found[name].kl is not None)


def test_experts_that_the_engine_chose_otherwise_are_a_cause(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)

    def route(router, args, kwargs, returned):
        logits = logits_of(returned)
        noise = 0.05 * torch.randn(logits.shape, generator=random)
        return following(router, args, kwargs, logits + noise)

    def routed(engine):
        for name, module in engine.float().named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(route, with_kwargs=True)

    found = causes_of(models.checkpoint(tmp_path, "qwen3-moe"), change=routed)
    assert found["routing"].share > 0.9, found
    assert all(abs(found[name].share) < 0.1 for name in WAYS)


def test_a_batch_that_the_model_does_not_take_says_so(tmp_path: Path) -> None:
    found = causes_of(models.checkpoint(tmp_path, "mamba2"))["trainer's attention"]
    assert (found.kl, found.share, found.part) == (None, None, "")
    assert found.problem.startswith("cannot compare here: Mamba2ForCausalLM does not support")


def test_truncated_sampling_is_a_cause(tmp_path: Path) -> None:
    cut = causes_of(models.checkpoint(tmp_path, "llama"), Trainer(top_p=0.9, top_k=50))
    all_tokens = cut["truncated sampling"]
    assert all_tokens.to == "top_p 0.9, top_k 50; the trainer's over all tokens"
    assert all_tokens.share < -100


def test_the_kept_tokens_are_weighed_as_they_are_drawn() -> None:
    rows = torch.tensor([[0.5, 0.3, 0.2]]).log()
    found = mean_kl(rows, torch.tensor([[0.2, 0.3, 0.5, 0.0]]).log())
    assert found == pytest.approx(0.3 * torch.tensor(2.5).log())
    assert kept_kl(rows, rows, 0.7, -1) == pytest.approx(-torch.tensor(0.8).log())
    assert kept_kl(rows, rows, 1.0, 1) == pytest.approx(-torch.tensor(0.5).log())
