"""What the FSDP actor gives its routers from verl's batches, and when."""

from types import SimpleNamespace

import pytest
import torch

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.replay import actor as replay

pytestmark = pytest.mark.verl

LENGTHS, PROMPTS = (5, 3), (2, 1)


def _nested(parts):
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(parts), torch.tensor([0, *torch.tensor([len(part) for part in parts]).cumsum(0)])
    )


def _batch(packed=True, masks=((1, 1, 1), (1, 0, 0)), experts=LENGTHS):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    rows = [100 * i + torch.arange(6 * n).view(n, 3, 2) for i, n in enumerate(experts)]
    fields = {
        "input_ids": _nested([torch.arange(n) for n in LENGTHS]),
        "prompts": _nested([torch.arange(n) for n in PROMPTS]),
        "loss_mask": torch.tensor(masks),
    }
    if experts:
        fields["routed_experts"] = _nested(rows)
    batch = TensorDict(fields, batch_size=2)
    tu.assign_non_tensor_data(batch, "use_remove_padding", packed)
    return batch, rows


def test_packed_records_follow_each_other_and_padded_ones_are_as_long_as_the_longest():
    batch, rows = _batch()
    record, needed = replay.record(batch)
    assert torch.equal(record, torch.cat(rows))
    assert needed.tolist() == [True] * 4 + [False] + [True] + [False] * 2
    batch, rows = _batch(packed=False)
    record, needed = replay.record(batch)
    assert torch.equal(record[:5], rows[0]) and torch.equal(record[5:8], rows[1]) and not record[8:].any()
    assert needed.tolist() == [True] * 4 + [False] + [True] + [False] * 4


def test_a_sequence_that_is_not_trained_on_needs_no_record_and_another_is_refused():
    batch, _ = _batch(masks=((0, 0, 0), (0, 1, 0)))
    assert replay.record(batch)[1].tolist() == [False] * 5 + [True, True, False]
    with pytest.raises(PatchError, match="no routed_experts"):
        replay.record(_batch(experts=())[0])
    with pytest.raises(PatchError, match="other lengths than the tokens"):
        replay.record(_batch(experts=(4, 4))[0])


def _engine(strategy="fsdp2"):
    from transformers import MixtralConfig, MixtralForCausalLM

    layers = dict(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, num_local_experts=4)
    config = MixtralConfig(vocab_size=16, hidden_size=8, intermediate_size=8, **layers)
    return SimpleNamespace(
        engine_config=SimpleNamespace(strategy=strategy), module=MixtralForCausalLM(config)
    )


@pytest.mark.parametrize(
    ("flags", "strategy", "replays"),
    [
        ({"enable_routing_replay": True}, "fsdp2", True),
        ({"enable_routing_replay": True}, "fsdp", True),
        ({"enable_routing_replay": False}, "fsdp", False),
        ({}, "fsdp", False),
        ({"enable_routing_replay": True}, "veomni", False),
        ({"enable_routing_replay": True}, "fsdp, its adapter off", False),
    ],
)
def test_only_marked_batches_of_the_actor_are_replayed(flags, strategy, replays):
    from verl.utils import tensordict_utils as tu

    batch, _ = _batch()
    for name, value in flags.items():
        tu.assign_non_tensor_data(batch, name, value)
    engine = _engine(strategy.partition(",")[0])
    if "off" in strategy:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(engine.module, LoraConfig(target_modules=["q_proj"]))
        model.base_model.disable_adapter_layers()
    router = engine.module.model.layers[0].mlp.gate
    seen = replay.forward_backward_batch(
        lambda self, data: (hasattr(self, replay.KEPT), len(router._forward_hooks)), engine, batch
    )
    assert seen == (replays, int(replays))
    assert not hasattr(engine, replay.KEPT) and not router._forward_hooks


def test_hooks_go_with_a_batch_that_fails():
    from verl.utils import tensordict_utils as tu

    batch, _ = _batch()
    tu.assign_non_tensor_data(batch, "enable_routing_replay", True)
    engine = _engine()

    def fail(self, data):
        raise RuntimeError("backward")

    with pytest.raises(RuntimeError, match="backward"):
        replay.forward_backward_batch(fail, engine, batch)
    assert not hasattr(engine, replay.KEPT)
    assert not engine.module.model.layers[0].mlp.gate._forward_hooks
