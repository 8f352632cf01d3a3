"""The family on the installed verl: which mesh it replicates, what it refuses, what each side says of the other."""

import pytest

pytestmark = pytest.mark.verl
NAMES = ""


def test_meshes_have_their_strategy_until_torch_or_verl_is_native(scenario):
    scenario("""
        from types import SimpleNamespace
        import flashpatch
        from flashpatch.patches.fsdp import trainer as mesh
        flashpatch.enable("cpu")  # verl's engines import on a machine without an accelerator
        import verl.utils.config
        import verl.workers.engine.fsdp.transformer_impl as impl
        import verl.workers.engine.fsdp.utils as utils
        from torch.distributed.fsdp import ShardingStrategy, _init_utils
        flashpatch.enable("fsdp")
        def grid(*shape):
            return SimpleNamespace(ndim=len(shape), shape=shape,
                                   size=lambda at=None: shape[at] if at is not None else shape[0])
        strategy = impl.get_sharding_strategy
        assert strategy(grid(2, 1)) == ShardingStrategy.NO_SHARD
        assert strategy(grid(1, 2)) == ShardingStrategy.HYBRID_SHARD
        assert strategy(grid(2, 4)) == ShardingStrategy.HYBRID_SHARD
        assert strategy(grid(2, 4), zero3_enable=False) == ShardingStrategy._HYBRID_SHARD_ZERO2
        assert strategy(grid(2)) == strategy(grid(1)) == ShardingStrategy.FULL_SHARD
        assert strategy(grid(1, 1)) == ShardingStrategy.HYBRID_SHARD
        flashpatch.disable("fsdp")
        # the patch stands aside as soon as torch couples the replicas itself, or verl names NO_SHARD
        site = SimpleNamespace(module=utils, name="get_sharding_strategy")
        assert mesh.native(site) is None
        def keeps(state, strategy, *rest):
            state.sharding_strategy = strategy
            return state
        stock, _init_utils._init_core_state = _init_utils._init_core_state, keeps
        assert "torch" in mesh.native(site)
        _init_utils._init_core_state = stock
        site.module = SimpleNamespace(get_sharding_strategy=lambda mesh: ShardingStrategy.NO_SHARD)
        assert "verl" in mesh.native(site)
        flashpatch.disable()
        utils.get_sharding_strategy = site.module.get_sharding_strategy
        flashpatch.enable("cpu", "fsdp")
        state = flashpatch.status()["fsdp.verl.get_sharding_strategy"].state
        assert state.word in ("superseded", "failed"), state
    """)


def test_a_recipe_that_the_audit_cannot_follow_is_refused_by_name(scenario):
    scenario("""
        import flashpatch, pytest
        flashpatch.enable("fsdp")
        from omegaconf import OmegaConf
        from verl.utils.config import validate_config
        role = {"rollout": {"name": "trtllm", "checkpoint_engine": {"backend": "delta_sharded"}},
                "actor": {"strategy": "megatron", "fsdp_config": {"qat": {"enable": True}}},
                "model": {"lora_rank": 8, "lora": {"merge": True}}}
        named = ["rollout.name=trtllm", "strategy=megatron", "backend=delta_sharded", "lora_rank with lora.merge",
                 "qat.enable", "FLASHPATCH without bf16 or fp8"]
        with pytest.raises(flashpatch.PatchError) as error:
            validate_config(OmegaConf.create({"actor_rollout_ref": role}), False, False)
        assert all(name in str(error.value) for name in named), error.value
        from flashpatch.patches.fsdp import verl_config
        adapters = {"actor_rollout_ref.model.lora_rank": 8}
        assert not list(verl_config.refusals(adapters.get, "refuse"))
        (problem,) = verl_config.refusals({**adapters, "actor_rollout_ref.rollout.name": "sglang"}.get, "report")
        assert "model.lora_rank on sglang" in problem
        flashpatch.enable("bf16")
        import dataclasses
        from flashpatch import registry
        whole = registry.patch
        too_new = dataclasses.replace(whole("fp8.verl_vllm.receiver_init_socket"), requires="verl>=99")
        registry.patch = {too_new.id: too_new}.__getitem__  # as if the installed verl were older
        with pytest.raises(flashpatch.PatchError, match="does not meet verl>=99"):
            validate_config(OmegaConf.create({"actor_rollout_ref": {}}), False, False)
        sends = [whole(f"fp8.{group}.update_weights_from_tensor") for group in ("verl_sglang", "verl_sglang_0_5_12")]
        registry.patch = {one.id: dataclasses.replace(one, requires="verl>=99") for one in sends}.__getitem__
        sglang = {"actor_rollout_ref": {"rollout": {"name": "sglang", "quantization": "fp8"}}}
        with pytest.raises(flashpatch.PatchError, match="does not meet verl>=99") as error:
            validate_config(OmegaConf.create(sglang), False, False)
        assert "rollout.quantization=fp8 (verl quantizes for sglang before" in str(error.value)
        assert "rollout.name=" not in str(error.value)
        registry.patch = whole
        flashpatch.enable("fsdp", audit="report")
        with pytest.raises(flashpatch.PatchError) as error:
            validate_config(OmegaConf.create({"actor_rollout_ref": role}), False, False)
        assert [name in str(error.value) for name in named] == [True] * 3 + [False] * 3, error.value
        with pytest.raises(flashpatch.PatchError, match="'audit_every' .* is 0, not at least 1"):
            flashpatch.enable("fsdp", audit="refuse", audit_every=0)
        flashpatch.enable("fsdp", audit="off", audit_every=1)
        with pytest.raises(Exception) as error:  # verl's own checks go on
            validate_config(OmegaConf.create({"actor_rollout_ref": role}), False, False)
        assert not isinstance(error.value, flashpatch.PatchError)
    """)


def test_each_side_says_when_the_other_is_not_patched(scenario):
    """A receiver alone, a trainer alone, a replayed sync, a sync without its end, and what shards cannot
    answer for: with stand-ins for the transport, whose own behaviour is not at stake."""
    scenario("""
        from types import SimpleNamespace
        import pytest, torch
        import flashpatch
        flashpatch.enable("fsdp")
        from flashpatch.patches.fsdp import arrival, fingerprints as wire, trainer as export
        cpu = torch.device("cpu")
        loaded = []
        def load(weights, is_last):
            loaded.append(([name for name, _ in weights], is_last))
        def deliver(*buckets):
            loaded.clear()
            def stock(self, on_bucket_received):
                for at, bucket in enumerate(buckets):
                    on_bucket_received(list(bucket), at == len(buckets) - 1)
            arrival.receive_weights(stock, None, load)
        a, b = ("a", torch.ones(3)), ("b", torch.zeros(2))
        with pytest.raises(flashpatch.PatchError, match="trainer's, does not carry the family fsdp"):
            deliver([a], [b])
        assert not loaded
        start = list(wire.opening({"source": "x", "sync": 1, "audited": True}, cpu))
        with pytest.raises(flashpatch.PatchError, match="did not arrive"):
            deliver([*start, a], [b])
        assert loaded == [(["a"], False)]
        with pytest.raises(flashpatch.PatchError, match="sync 1 is a replay"):
            deliver([*start, a], [b])
        start = list(wire.opening({"source": "x", "sync": 2, "audited": True}, cpu))
        other = list(wire.closing({"sync": 1, "sent": {}, "not_audited": []}, cpu))
        with pytest.raises(flashpatch.PatchError, match="not those of this sync"):
            deliver([*start, a], other)
        skipped = list(wire.opening({"source": "x", "sync": 3, "audited": False}, cpu))
        deliver([*skipped, a], [b])
        assert loaded == [(["a"], False), (["b"], True)]
        def deliver_as_before_09(*buckets):  # verl 0.7 and 0.8 do not say which bucket is the last
            def stock(self, on_bucket_received):
                for bucket in buckets:
                    on_bucket_received(list(bucket))
            loaded.clear()
            arrival.receive_weights(stock, None, lambda weights: load(weights, None))
        from flashpatch.patches._shared import fingerprint
        from flashpatch.patches.fsdp.fingerprints import Seen
        sums = {name: Seen(tuple(t.shape), str(t.dtype), fingerprint.of(t)).as_json() for name, t in (a, b)}
        for sync, values in ((4, sums), (5, {**sums, "b": sums["a"]})):
            start = list(wire.opening({"source": "x", "sync": sync, "audited": True}, cpu))
            end = list(wire.closing({"sync": sync, "sent": values, "not_audited": []}, cpu))
            if sync == 4:
                deliver_as_before_09([*start, a], [b, *end])
                assert loaded == [(["a"], None), (["b"], None)]
            else:
                with pytest.raises(flashpatch.PatchError, match="b has shape"):
                    deliver_as_before_09([*start, a], [b, *end])
                assert loaded == [(["a"], None)]
        start = list(wire.opening({"source": "x", "sync": 6, "audited": True}, cpu))
        with pytest.raises(flashpatch.PatchError, match="did not arrive"):
            deliver_as_before_09([*start, a], [b])
        flashpatch.enable("fsdp", audit="off")
        deliver([a], [b])
        with pytest.raises(flashpatch.PatchError, match="here the audit is off"):
            deliver([*start, a], [b])
        flashpatch.enable("fsdp", audit="refuse")
        trainer = SimpleNamespace(module=SimpleNamespace(), _qat_enabled=True)
        with pytest.raises(flashpatch.PatchError, match="quantization-aware"):
            export.get_per_tensor_param(lambda self, *_: (iter([a]), None), trainer)
        trainer.module.peft_config = {}
        with pytest.raises(flashpatch.PatchError, match="merged LoRA"):
            export.get_per_tensor_param(lambda self, *_: (iter([a]), None), trainer)
        flashpatch.enable("fsdp", audit="off")
        tensors, adapter = export.get_per_tensor_param(lambda self, *_: (iter([a]), {"r": 8}), trainer)
        assert [name for name, _ in tensors] == ["a"] and adapter == {"r": 8}
    """)
