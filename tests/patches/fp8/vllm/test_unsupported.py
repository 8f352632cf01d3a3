"""What an engine may do that an update cannot follow is refused by name, at start or at the update."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, scenario

from flashpatch.patches.fp8.vllm import unsupported

pytestmark = pytest.mark.vllm

TURNED = "model.layers.0.mlp.down_proj.R4_input"
STARTS = {
    "nccl_m2n": "reshards into the parameters in use",
    "sparse_nccl": "writes single values into the parameters in use",
    "sharded_rdt": "replays recorded copies into the parameters in use",
    "modelexpress": "receives into the parameters in use",
    "lab-own": "is not known to load by load_weights alone",
    "ipc_cache": "shares the memory of weights with other engines",
}


def refused(a: str, b: str) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.engine.arg_utils import EngineArgs

    from flashpatch.patches.fp8.vllm import unsupported

    def config(**kw: Any) -> Any:
        return EngineArgs(model=a, **kw).create_engine_config()

    found: dict[str, Any] = {}
    WeightTransferEngineFactory.register_engine("lab-own", WeightTransferEngine)
    for name in STARTS:
        if name == "ipc_cache":
            kw = dict(load_format=name)
        else:
            kw = dict(weight_transfer_config=WeightTransferConfig(backend=name))
        found[name] = updates.error(lambda kw=kw: config(**kw))
    found["nccl"] = updates.error(lambda: config(weight_transfer_config=WeightTransferConfig(backend="nccl")))
    found["prefetch"] = unsupported.at_update(config(offload_group_size=2))
    with engines.open_llm(a) as llm:
        weights = list(models.weights(b))
        found["kernel format"] = updates.error(
            lambda: llm.collective_rpc(
                "reload_weights", kwargs=dict(weights_iterator=weights, is_checkpoint_format=False)
            )
        )
        found["discard"] = updates.error(lambda: llm.collective_rpc("discard", args=(("weights",),)))
        found["session"] = updates.error(lambda: llm.collective_rpc("start_weight_update", args=(False,)))
        found["refusal"] = updates.refusal(llm)
    return found


def updates_refused(dense: str, experts: str) -> dict[str, str | None]:
    """Why an engine of each configuration takes no update."""
    from vllm.config import ECTransferConfig, KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from flashpatch.patches.fp8.vllm import unsupported

    def config(model: str = dense, **kw: Any) -> Any:
        return EngineArgs(model=model, **kw).create_engine_config()

    def handing_on(name: str, **extra: Any) -> Any:
        transfer = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)
        return config(kv_transfer_config=transfer)

    backend = config(experts)
    backend.kernel_config.moe_backend = "flashinfer_moe_ep_cutedsl"
    parts = [
        dict(kv_connector=name, kv_role="kv_both") for name in ("OffloadingConnector", "MooncakeConnector")
    ]
    tiers = dict(spec_name="TieringOffloadingSpec", secondary_tiers=[dict(type="fs", root_dir="/nowhere")])
    elsewhere = handing_on("OffloadingConnector")
    elsewhere.kv_transfer_config.kv_connector = "Elsewhere"
    scaled = config(kv_cache_dtype="fp8")
    scaled.cache_config.calculate_kv_scales = True  # which vLLM 0.24 takes, and later ones ignore
    encoder = config()
    encoder.ec_transfer_config = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")
    found = {
        "Nixl": handing_on("NixlConnector"),
        "several": handing_on("MultiConnector", connectors=parts),
        "offloading": handing_on("OffloadingConnector"),
        "tiers": handing_on("OffloadingConnector", **tiers),
        "no tiers": handing_on("OffloadingConnector", spec_name="TieringOffloadingSpec"),
        "unknown place": handing_on("OffloadingConnector", spec_name="Own", spec_module_path="own"),
        "store": handing_on("MooncakeStoreConnector"),
        "unknown": elsewhere,
        "scaled": scaled,
        "encoder": encoder,
        "backend": backend,
        "experts": config(experts),
        "experts of two engines": config(experts, data_parallel_size=2),
        "two engines": config(data_parallel_size=2),
        "shards of adapters": config(enable_lora=True, fully_sharded_loras=True),
    }
    return {name: unsupported.at_update(made) for name, made in found.items()}


def transforming(a: str, b: str) -> list[Any]:
    """What two updates raise on an engine whose layers turn their inputs, and whether it may generate then."""
    import torch

    from flashpatch.patches.fp8 import model_registry

    quantization = json.loads(Path(a, "config.json").read_text())["quantization_config"]
    turn = dict(type="random-matrix", apply=[dict(targets=["re:.*down_proj"], location="input")])
    quantization["transform_config"] = dict(config_groups=dict(R4=turn))
    weights = [*models.weights(b), (f"{TURNED}.weight", torch.eye(512))]
    with engines.open_llm(a, hf_overrides=dict(quantization_config=quantization)) as llm:
        found = [updates.error(lambda: updates.send(llm, [weights])) for _ in range(2)]
        return [*found, model_registry.get(engines.inner_model(llm)).may_generate]


def requantizing(a: str, b: str) -> tuple[str, bool]:
    """What an update raises on an engine whose layers say, as those of vLLM 0.33 do, that they quantize a quantized checkpoint."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from flashpatch.patches.fp8 import model_registry

    UnquantizedLinearMethod.requantization_source = UnquantizedLinearMethod()
    with engines.open_llm(a) as llm:
        found = updates.error(lambda: updates.send(llm, [list(models.weights(b))]))
        return found, model_registry.get(engines.inner_model(llm)).may_generate


def reranking(a: str, b: str) -> list[str]:
    made = dict(classifier_from_token=["t4", "t5"], is_original_qwen3_reranker=True)
    architecture = dict(architectures=["Qwen3ForSequenceClassification"])
    with engines.open_llm(a, runner="pooling", hf_overrides=architecture | made) as llm:
        parts = list(models.weights(b))
        return [updates.error(lambda way=way: way(llm, parts)) for way in (updates.send, updates.sync)]


def test_a_reranker_made_of_a_causal_model_is_refused_by_name() -> None:
    """Its loader makes a head, loads into it and deletes it."""
    paths = [updates.checkpoint("qwen3", seed) for seed in (0, 1)]
    errors = scenario.run(reranking, *paths, env={"FLASHPATCH": "bf16"})
    assert all("cannot be updated: vLLM makes its classifier of the" in error for error in errors), errors


def test_a_checkpoint_that_vllm_quantizes_anew_is_refused_by_name() -> None:
    found, serves = scenario.run(
        requantizing, *(updates.checkpoint("qwen2", seed) for seed in (0, 1)), env={"FLASHPATCH": "bf16"}
    )
    assert (
        "cannot be updated: vLLM quantizes its checkpoint anew, from UnquantizedLinearMethod's values"
        in found
    )
    assert serves


def test_transforms_that_layers_share_are_refused_by_name() -> None:
    """The first update ended with an AttributeError, and no later one helped."""
    a, b = (updates.checkpoint("qwen2", seed, "int8") for seed in (0, 1))
    first, second, serves = scenario.run(transforming, a, b, env={"FLASHPATCH": "bf16"})
    assert first == second and f"{TURNED}.weight is a SharedWeightParameter, which has no tensor of" in first
    assert serves


def test_engines_whose_policy_would_be_mixed_are_refused_by_name() -> None:
    paths = [updates.checkpoint(family, 0) for family in ("qwen2", "qwen3-moe")]
    found = scenario.run(updates_refused, *paths, env={"FLASHPATCH": "bf16"})
    assert "NixlConnector (kv_transfer_config) hands KV on" in found["Nixl"]
    assert "MooncakeConnector (kv_transfer_config) hands KV on" in found["several"]
    assert (
        "OffloadingConnector with secondary_tiers (kv_transfer_config) keeps KV in a store" in found["tiers"]
    )
    assert "MooncakeStoreConnector (kv_transfer_config) keeps KV in a store" in found["store"]
    assert "Elsewhere (kv_transfer_config) does not say what its reset empties" in found["unknown"]
    assert "spec_name='Own'" in found["unknown place"]
    assert "calculate_kv_scales computes the scales of the KV cache under the first policy" in found["scaled"]
    assert "ec_transfer_config" in found["encoder"]
    assert "flashinfer_moe_ep_cutedsl" in found["backend"]
    assert "data_parallel_size=2" in found["experts of two engines"]
    assert "enable_lora" in found["shards of adapters"]
    assert "fully_sharded_loras" in found["shards of adapters"]
    assert found["offloading"] is found["no tiers"] is found["experts"] is found["two engines"] is None


def test_each_kv_connector_of_the_installed_vllm_is_in_the_table() -> None:
    root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    for file, register, table in (
        ("distributed/kv_transfer/kv_connector/factory.py", "register_connector", unsupported.CONNECTORS),
        ("v1/kv_offload/factory.py", "register_spec", unsupported.OFFLOADING),
    ):
        names = re.findall(rf'\.{register}\(\s*"(\w+)"', (root / file).read_text())
        assert len(names) > 1 and set(names) <= {*table}, "say what its reset empties"


def test_what_writes_past_an_update_is_refused_by_name() -> None:
    a, b = (updates.checkpoint("qwen2", seed) for seed in (0, 1))
    found = scenario.run(refused, a, b, env={"FLASHPATCH": "bf16"})
    for name, why in STARTS.items():
        assert "PatchError" in found[name] and why in found[name], found[name]
    assert found["nccl"] is None
    assert "offload_group_size" in found["prefetch"]
    assert "past load_weights" in found["kernel format"]
    assert found["discard"].startswith("PatchError"), found["discard"]
    assert found["session"].split(":")[0] in ("PatchError", "TypeError"), found["session"]  # vLLM's own
    assert found["refusal"] is None, "nothing has changed"
