"""What is written over a model's configuration for int8, without an engine."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from flashpatch import PatchError
from flashpatch.patches.fp8.vllm import int8_config


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch) -> None:
    monkeypatch.setattr(int8_config, "inexact", lambda: False)


def arguments(**kw: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"model": "m", "quantization": None, "hf_overrides": {}, **kw})


def test_the_configuration_says_w8a8_and_carries_the_mark() -> None:
    args = arguments(hf_overrides={"rope_theta": 1e6})
    assert not int8_config.is_marked(args)
    int8_config.configure(args, profile="")
    written = args.hf_overrides["quantization_config"]
    assert args.quantization == written["quant_method"] == "compressed-tensors"
    assert args.hf_overrides["rope_theta"] == 1e6 and int8_config.is_marked(args)
    [group] = written["config_groups"].values()
    weights = group["weights"]
    assert (weights["strategy"], weights["num_bits"], weights["type"]) == ("channel", 8, "int")
    assert group["input_activations"]["strategy"] == "token" and group["input_activations"]["dynamic"]
    model = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=written))
    assert int8_config.read_mark(model) == {"profile": "", "at_load": True}
    assert json.loads(json.dumps(written)) == written


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        ("lm_head", True),
        ("model.lm_head", True),
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.shared_expert_gate", True),
        ("model.layers.3.block_sparse_moe.router", True),
        ("visual.blocks.0.attn.qkv", True),
        ("model.vision_tower.layers.0.fc1", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.mlp.gate_up_proj", False),
        ("model.layers.0.self_attn.o_proj", False),
        ("model.layers.0.mlp.shared_expert.down_proj", False),
    ],
)
def test_which_layers_stay(layer: str, kept: bool) -> None:
    def matches(pattern: str) -> bool:  # as compressed-tensors reads them
        return bool(re.match(pattern[3:], layer)) if pattern.startswith("re:") else pattern == layer

    assert any(map(matches, int8_config.KEPT)) is kept


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (lambda config: config, "hf_overrides is a function"),
        ({"quantization_config": {"quant_method": "gptq"}}, "has 'quantization_config' already"),
    ],
)
def test_a_callers_overrides_are_not_lost(overrides: Any, said: str) -> None:
    args = arguments(hf_overrides=overrides)
    with pytest.raises(PatchError, match=said):
        int8_config.configure(args, profile="")
    assert args.hf_overrides is overrides


@pytest.mark.parametrize("path", ["profile.safetensors", "/no/such/profile.safetensors"])
def test_a_profile_is_an_absolute_path_of_a_file(path: str) -> None:
    with pytest.raises(PatchError, match="not an absolute path of a file"):
        int8_config.configure(arguments(), profile=path)


def test_a_template_keeps_its_own_and_is_not_smoothed_at_load() -> None:
    args = arguments()
    own = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    int8_config.configure_template(args, own, profile="")
    assert args.hf_overrides["quantization_config"] == {
        **own,
        "flashpatch": {"profile": "", "at_load": False},
    }
    assert args.quantization is None and int8_config.is_marked(args)
    other = arguments()
    int8_config.configure_template(other, {"quant_method": "gptq"}, profile="")
    assert not int8_config.is_marked(other)
    with pytest.raises(PatchError, match="quantized otherwise"):
        int8_config.configure_template(other, {"quant_method": "gptq"}, profile="/p")


def test_a_template_whose_int8_holds_4_bits_is_not_marked() -> None:
    def own(bits: int, form: str) -> dict[str, Any]:
        groups = {"group_0": {"weights": {"num_bits": bits, "type": "int", "strategy": "channel"}}}
        return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}

    for bits, form, marked in (
        (8, "int-quantized", True),
        (4, "pack-quantized", True),  # no loader of these takes wide values
        (4, "int-quantized", False),
    ):
        args = arguments()
        int8_config.configure_template(args, own(bits, form), profile="")
        assert int8_config.is_marked(args) is marked, (bits, form)
    with pytest.raises(PatchError, match="otherwise than by compressed-tensors in 8 bits"):
        int8_config.configure_template(arguments(), own(4, "int-quantized"), profile="/p")


def test_weight_only_needs_torchao(monkeypatch) -> None:
    monkeypatch.setattr(int8_config, "find_spec", lambda name: None)
    with pytest.raises(PatchError, match="needs torchao"):
        int8_config.configure_weight_only(arguments())
