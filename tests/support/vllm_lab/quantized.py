"""Checkpoints in compressed-tensors formats, made from the bf16 ones by rounding to nearest."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_lab.models import making, weights, write_changed

GROUP = 128
Tensors = Iterator[tuple[str, Any]]


def quantize(model: str | os.PathLike[str], scheme: str) -> Path:
    """The directory beside `model` with its linear layers in `scheme` (of SCHEMES); made when missing."""
    source = Path(model)
    with making(source.with_name(f"{source.name}-{scheme}")) as (target, work):
        if work is not None:
            _write(source, work, *SCHEMES[scheme])
    return target


def is_linear(name: str) -> bool:
    """Whether this is the weight of a linear layer in one of SCHEMES, an expert's included: not head or router."""
    return name.endswith("proj.weight") or re.search(r"\.experts\.\d+\.w[123]\.weight$", name) is not None


def _int8_channel(name: str, weight: Any) -> Tensors:
    import torch

    scale = _scale(weight.float().abs().amax(1, keepdim=True), 127)
    yield name, (weight.float() / scale).round().to(torch.int8)
    yield f"{name}_scale", scale


def _fp8_channel(name: str, weight: Any) -> Tensors:
    yield from _fp8(name, weight, weight.float().abs().amax(1, keepdim=True))


def _fp8_tensor(name: str, weight: Any) -> Tensors:
    yield from _fp8(name, weight, weight.float().abs().amax().reshape(1))


def _fp8(name: str, weight: Any, peak: Any) -> Tensors:
    import torch

    scale = _scale(peak, 448)
    yield name, (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    yield f"{name}_scale", scale


def _int4_packed(name: str, weight: Any) -> Tensors:
    """Groups of 128 inputs share a scale; eight values, offset by 8, per int32, the first in the low bits."""
    import torch

    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    scale = _scale(groups.abs().amax(2, keepdim=True), 7).to(weight.dtype)
    nibbles = (groups / scale.float()).round().clamp(-8, 7).to(torch.int64).view(rows, columns // 8, 8) + 8
    packed = (nibbles << torch.arange(0, 32, 4)).sum(2)
    yield name + "_packed", torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    yield name + "_scale", scale.squeeze(2)
    yield name + "_shape", torch.tensor([rows, columns])


def _scale(peak: Any, largest: int) -> Any:
    return peak.clamp(min=1e-8) / largest


def _write(
    source: Path,
    target: Path,
    convert: Callable[[str, Any], Tensors],
    kind: str,
    weight: Mapping[str, Any],
    activation: Mapping[str, Any] | None,
) -> None:
    converted: dict[str, Any] = {}
    for name, tensor in weights(source):
        converted.update(convert(name, tensor) if is_linear(name) else [(name, tensor)])
    write_changed(target, source, {name: tensor.contiguous() for name, tensor in converted.items()})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = dict(
        quant_method="compressed-tensors",
        format=kind,
        quantization_status="compressed",
        ignore=["lm_head", r"re:.*\.gate$"],
        config_groups=dict(group_0=dict(targets=["Linear"], weights=weight, input_activations=activation)),
    )
    (target / "config.json").write_text(json.dumps(config, indent=2))


def _values(bits: int, kind: str, strategy: str, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return dict(num_bits=bits, type=kind, strategy=strategy, dynamic=dynamic, symmetric=True, **more)


#: scheme -> (converter, compressed-tensors format, how weights are stored, how activations are quantized)
SCHEMES: Mapping[
    str, tuple[Callable[[str, Any], Tensors], str, Mapping[str, Any], Mapping[str, Any] | None]
] = {
    "int8": (_int8_channel, "int-quantized", _values(8, "int", "channel"), _values(8, "int", "token", True)),
    "fp8-channel": (
        _fp8_channel,
        "float-quantized",
        _values(8, "float", "channel"),
        _values(8, "float", "token", True),
    ),
    "fp8-tensor": (
        _fp8_tensor,
        "float-quantized",
        _values(8, "float", "tensor"),
        _values(8, "float", "tensor", True),
    ),
    "w4a16": (_int4_packed, "pack-quantized", _values(4, "int", "group", group_size=GROUP), None),
}


def torchao(kind: str) -> dict[str, Any]:
    """Keywords of an engine that quantizes online with torchao's configuration class `kind`."""
    config = json.dumps({"_type": kind, "_version": 2, "_data": {}})
    return dict(quantization="torchao", hf_overrides=dict(quantization_config_dict_json=config))
