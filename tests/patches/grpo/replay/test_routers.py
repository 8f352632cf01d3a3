"""Recorded experts in the routers of Hugging Face models: what they weigh, their gradients, what is refused."""

import pytest
import torch
from flow_lab import forced

transformers = pytest.importorskip("transformers", minversion="5.0")

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.replay.routers import Replay

SMALL = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, head_dim=8)
SMALL |= dict(num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=3, max_position_embeddings=64)
SMALL |= dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)
MLA = dict(kv_lora_rank=8, q_lora_rank=None, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
GROUPS = dict(n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=12)
MODELS = {
    "qwen3_moe": dict(num_experts=8, moe_intermediate_size=12, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen2_moe": dict(num_experts=8, moe_intermediate_size=12, norm_topk_prob=False),
    "olmoe": dict(num_experts=8, norm_topk_prob=False),
    "mixtral": dict(num_local_experts=8),
    "gpt_oss": dict(num_local_experts=8, sliding_window=32),
    "deepseek_v3": {**GROUPS, **MLA, "head_dim": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "glm4_moe": {**GROUPS, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
}
TOKENS = torch.randint(1, 32, (2, 7), generator=torch.Generator().manual_seed(3))


def _model(kind, dtype=torch.float64):
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **MODELS[kind]})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).to(dtype)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return model.eval()


def _loss(model):
    logs = model(TOKENS, use_cache=False).logits[:, :-1].log_softmax(-1)
    return logs.gather(-1, TOKENS[:, 1:, None]).squeeze(-1)


def _record(layers, experts=8, width=3, of=3):
    """Random distinct experts for the layers that have a router, as an engine records them for all."""
    draw = torch.Generator().manual_seed(5)
    rows = torch.zeros((TOKENS.numel(), of, width), dtype=torch.int16)
    for layer in layers:
        rows[:, layer] = (
            torch.rand((len(rows), experts), generator=draw).argsort(-1)[:, :width].to(torch.int16)
        )
    return rows


ALL = torch.ones(TOKENS.numel(), dtype=torch.bool)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss"])
def test_values_and_gradients_are_those_of_the_model_s_own_code_on_these_experts(kind):
    model = _model(kind)
    replay = Replay(model)
    record = _record(replay.layers)
    with forced(record, replay.layers):
        wanted = _loss(model)
        gradients = torch.autograd.grad(wanted.sum(), list(model.parameters()), allow_unused=True)
    stock = _loss(model)
    replay.begin(record, ALL)
    got = _loss(model)
    replay.check()
    ours = torch.autograd.grad(got.sum(), list(model.parameters()), allow_unused=True)
    assert (got - wanted).abs().max() < 1e-6  # routers compute in float32
    assert (stock - wanted).abs().max() > 1e-2
    for (name, _), one, other in zip(model.named_parameters(), ours, gradients, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_differences_of_values_in_float64(kind, monkeypatch):
    wide = lambda self: self if self.is_floating_point() else self.double()  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "float", wide)  # weights are computed in float64 too
    model = _model(kind)
    replay = Replay(model)
    replay.begin(_record(replay.layers), ALL)
    routers = [
        (n, p) for n, p in model.named_parameters() if n.endswith((".mlp.gate.weight", ".router.weight"))
    ]
    assert len(routers) == len(replay.layers)
    for name, weight in routers:
        (gradient,) = torch.autograd.grad(_loss(model).sum(), [weight])
        assert gradient.abs().max() > 1e-6, name
        step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=weight.dtype)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(step, alpha=sign * 1e-3)
                values.append(float(_loss(model).sum()))
                weight.sub_(step, alpha=sign * 1e-3)
        slope = (values[0] - values[1]) / 2e-3
        assert float((gradient * step).sum()) == pytest.approx(slope, rel=5e-3, abs=1e-4), name


@pytest.mark.parametrize("kind", MODELS)
def test_the_ratio_is_one_if_an_engine_in_bf16_chose_the_experts(kind, monkeypatch):
    """Equal weights, another precision: without its choice a token gets other experts."""
    model = _model(kind, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router.weight" in name:
                parameter.mul_(0.02)  # near ties
            parameter.copy_(parameter.bfloat16())
    replay, chosen, original = Replay(model), [], torch.topk

    def topk(values, k, **how):
        found = original(values, k, **how)
        chosen.extend([found.indices] * (k == SMALL["num_experts_per_tok"]))  # not of groups of experts
        return found

    with monkeypatch.context() as inside, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        inside.setattr(torch, "topk", topk)
        engine = _loss(model).float()
    record = _record([])
    for layer, ids in zip(replay.layers, chosen, strict=True):
        record[:, layer] = ids.to(torch.int16)
    with torch.no_grad():
        stock = (_loss(model) - engine).exp()
        replay.begin(record, ALL)
        replayed = (_loss(model) - engine).exp()
    assert (replayed - 1).abs().max() < 0.1
    # equal where bf16 turned no choice over
    assert (replayed - 1).abs().max() <= (stock - 1).abs().max() + 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_recomputed_route_the_same(reentrant):
    model = _model("qwen3_moe").train()
    replay = Replay(model)
    replay.begin(_record(replay.layers), ALL)
    plain = torch.autograd.grad(_loss(model).sum(), list(model.parameters()), allow_unused=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    _loss(model).sum().backward()
    for one, parameter in zip(plain, model.parameters(), strict=True):
        assert one is None or torch.equal(one, parameter.grad)


def test_a_part_of_the_tokens_gets_its_own_rows_and_padding_routes_by_itself():
    model = _model("mixtral")
    replay = Replay(model)
    seen = {}
    router = model.model.layers[0].mlp.gate
    router.register_forward_hook(lambda module, inputs, output: seen.update(ids=output[2]))
    record = _record(replay.layers)
    replay.begin(record, ALL, rank=1, ranks=2)
    router(torch.randn(9, 16, dtype=torch.float64))
    assert torch.equal(seen["ids"][:5], record[9:, 0].long())
    assert all(len(set(row.tolist())) == 3 for row in seen["ids"][5:])


def test_removed_hooks_leave_the_model_as_it_was():
    for kind in ("mixtral", "glm4_moe"):
        model = _model(kind)
        before = _loss(model)
        replay = Replay(model)
        replay.begin(_record(replay.layers), ALL)
        assert not torch.equal(_loss(model), before)
        replay.remove()
        assert torch.equal(_loss(model), before)
        assert not any("route_tokens_to_experts" in vars(module) for module in model.modules())


def test_a_record_of_other_layers_is_refused():
    replay = Replay(_model("qwen3_moe"))
    with pytest.raises(PatchError, match=r"those without a router in the trainer's model among them: \[1\]"):
        replay.begin(_record([0, 1, 2]), ALL)
    with pytest.raises(PatchError, match=r"of layers \[2\] it recorded nothing"):
        replay.begin(_record([0], of=2), ALL)
    with pytest.raises(
        PatchError, match="14 of 14 tokens up to the last one trained on have no recorded experts"
    ):
        replay.begin(_record([0]), ALL)


def test_a_needed_token_without_record_is_refused_and_the_last_one_needs_none():
    replay = Replay(_model("mixtral"))
    record = _record(replay.layers)
    record[-1] = 0
    replay.begin(record, torch.arange(14) < 13)
    with pytest.raises(PatchError, match="1 of 14 tokens"):
        replay.begin(record, ALL)


def test_a_router_that_is_not_called_stops_the_step():
    model = _model("mixtral")
    replay = Replay(model)
    replay.begin(_record(replay.layers), ALL)
    model.model.layers[1].mlp.forward = lambda hidden: hidden
    _loss(model)
    with pytest.raises(PatchError, match=r"2 of 3 recorded layers were routed .*model\.layers\.1\.mlp\.gate"):
        replay.check()


def test_other_numbers_of_experts_or_tokens_are_refused():
    model = _model("mixtral")
    replay = Replay(model)
    replay.begin(torch.cat([_record(replay.layers)] * 2), torch.cat([ALL, ALL]))
    with pytest.raises(PatchError, match="routes 14 tokens, of 28 recorded"):
        _loss(model)
    replay.begin(_record(replay.layers, width=2), ALL)
    with pytest.raises(PatchError, match="chose 2 experts per token"):
        _loss(model)
    replay.begin(_record(replay.layers, experts=16), ALL)
    with pytest.raises(PatchError, match="has 8"):
        _loss(model)
    with pytest.raises(PatchError, match="one expert per token"):
        replay.begin(_record(replay.layers, width=1), ALL)


def test_another_way_to_weigh_is_noticed():
    model = _model("qwen3_moe")
    router = model.model.layers[0].mlp.gate
    router.register_forward_hook(lambda module, inputs, output: (output[0], output[1] * 2, output[2]))
    replay = Replay(model)
    replay.begin(_record(replay.layers), ALL)
    with pytest.raises(PatchError, match=r"model\.layers\.0\.mlp\.gate weighs its experts in another way"):
        _loss(model)


def test_a_dense_model_is_refused():
    config = transformers.AutoConfig.for_model("llama", **SMALL)
    with pytest.raises(PatchError, match="LlamaForCausalLM has no router of a known class"):
        Replay(transformers.AutoModelForCausalLM.from_config(config))
