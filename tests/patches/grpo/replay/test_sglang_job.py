"""Unmodified verl on SGLang: a tiny Qwen3-MoE's actor answers with the experts that the engine recorded."""

from pathlib import Path

import pytest
import torch
import verl_job
from verl_job import calls, live, metrics, train

pytestmark = [pytest.mark.verl, pytest.mark.sglang(least="0.5.23"), pytest.mark.full]

REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """verl's tiny world with a random mixture of eight experts, whose routers are near ties."""
    from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = verl_job.make_world(tmp_path_factory.mktemp("world"))
    plain = AutoConfig.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens(["<|im_end|>", "\n"], special_tokens=True)  # verl asks for them
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.1,
        pad_token_id=plain.pad_token_id,
        bos_token_id=plain.bos_token_id,
        eos_token_id=plain.eos_token_id,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight.data *= 0.02
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    return folder


def test_two_steps_with_the_engines_experts(experts: Path, tmp_path: Path) -> None:
    """A layer that fires without a record, or has one and does not fire, would stop the step."""
    gaps, processes = {}, []
    for name, settings in {"stock": (), "replayed": (REPLAY,)}.items():
        folder = tmp_path / name
        given = ("actor_rollout_ref.rollout.name=sglang", "data.seed=1", *settings)
        done = train(experts, folder, *given, FLASHPATCH="cpu,bf16,grpo")
        assert done.returncode == 0, done.stdout[-8000:]
        assert metrics(done.stdout, "training/global_step") == [1, 2]
        assert min(metrics(done.stdout, "actor/grad_norm")) > 0
        gaps[name], processes = metrics(done.stdout, "mismatch/k3"), live(folder)
        print(name, gaps[name])
    assert gaps["replayed"][0] < gaps["stock"][0] / 3, gaps
    assert calls(processes, "grpo.sglang.generate_request") >= 64
    assert calls(processes, "grpo.verl.forward_step") >= 4
