"""Pairs of checkpoints, A and B, in the formats of the cases. B's scales differ from A's in magnitude, not only in noise.

Two random models of equal spread have nearly equal scales: an update that forgot some of them could hide."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_lab import models, quantized
from vllm_lab.models import making

BLOCK = 128
Tensors = Iterator[tuple[str, Any]]


def pair(root: Path, family: str, scheme: str = "", **config: Any) -> tuple[Path, Path]:
    """Return the directories of A and B; made when missing.

    ``root``: folder for checkpoints; ``family``: of `vllm_lab.models.FAMILIES`; ``scheme``: "" for bf16, one of `SCHEMES`, or
    one of `vllm_lab.quantized.SCHEMES`; ``config``: changes the model's config."""
    plain = [models.checkpoint(root, family, 0, **config)]
    plain.append(_spread(models.checkpoint(root, family, 1, **config)))
    if not scheme:
        return plain[0], plain[1]
    if scheme in SCHEMES:
        first, second = (_converted(path, scheme) for path in plain)
    else:
        first, second = (quantized.quantize(path, scheme) for path in plain)
    return first, second


def _spread(source: Path) -> Path:
    """The same model with each block of rows and columns of its projections at another magnitude."""
    import torch

    def convert(name: str, weight: Any) -> Tensors:
        if name.endswith("proj.weight") or "with_mqa.weight" in name:
            rows = 2.0 ** (torch.arange(weight.shape[0]) // BLOCK % 3 * 2 + 1)
            columns = 2.0 ** (torch.arange(weight.shape[1]) // BLOCK % 2 * 3)
            weight = (0.37 * weight.float() * rows[:, None] * columns[None]).to(weight.dtype)
        yield name, weight

    return _written(source, "spread", convert, None)


def _converted(source: Path, scheme: str) -> Path:
    convert, config = SCHEMES[scheme]
    return _written(source, scheme, convert, config)


def _written(source: Path, suffix: str, convert: Callable[[str, Any], Tensors], config: dict | None) -> Path:
    with making(source.with_name(f"{source.name}-{suffix}")) as (target, work):
        if work is None:
            return target
        tensors = {n: t.contiguous() for name, w in models.weights(source) for n, t in convert(name, w)}
        models.write_changed(work, source, tensors)
        if config is not None:
            whole = json.loads((work / "config.json").read_text()) | {"quantization_config": config}
            (work / "config.json").write_text(json.dumps(whole))
    return target


def _block_fp8(name: str, weight: Any) -> Tensors:
    """DeepSeek's format: a scale per block of 128 by 128."""
    import torch

    if not quantized.is_linear(name) and "with_mqa.weight" not in name:
        yield name, weight
        return
    rows, columns = weight.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(down * BLOCK, across * BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(down, BLOCK, across, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-8) / 448
    rounded = (blocks / scale[:, None, :, None]).view(down * BLOCK, across * BLOCK)[:rows, :columns]
    yield name, rounded.to(torch.float8_e4m3fn)
    yield f"{name}_scale_inv", scale


def _static_fp8(name: str, weight: Any) -> Tensors:
    """A scale per tensor, of activations and of the KV cache too."""
    import torch

    if not quantized.is_linear(name):
        yield name, weight
        return
    scale = weight.float().abs().amax() / 448
    yield name, (weight.float() / scale).to(torch.float8_e4m3fn)
    yield f"{name}_scale", scale.reshape(())
    yield name.replace(".weight", ".input_scale"), (0.02 + scale).reshape(())
    for part, factor in (("k", 3), ("v", 5)):
        if name.endswith(f"{part}_proj.weight"):
            yield name.replace(".weight", f".{part}_scale"), (scale * factor).reshape(())


def _per_channel(kind: str) -> Callable[[str, Any], Tensors]:
    """SGLang's w8a8 formats: a scale per row, as compressed-tensors has it."""
    convert = quantized.SCHEMES[kind][0]

    def rounded(name: str, weight: Any) -> Tensors:
        yield from convert(name, weight) if quantized.is_linear(name) else [(name, weight)]

    return rounded


def _nvfp4(name: str, weight: Any) -> Tensors:
    """compressed-tensors' NVFP4: 16 inputs share a scale in fp8, itself in parts of one of the tensor; both are divisors."""
    import torch

    if not quantized.is_linear(name):
        yield name, weight
        return
    groups = weight.float().unflatten(1, (-1, 16))
    peaks = groups.abs().amax(2, keepdim=True)
    of_tensor = 448 * 6 / peaks.max()
    scale = (peaks / 6 * of_tensor).clamp(min=2**-6).to(torch.float8_e4m3fn)
    yield f"{name}_packed", _fp4(groups * of_tensor / scale.float())
    yield f"{name}_scale", scale.squeeze(2)
    yield f"{name}_global_scale", of_tensor.reshape(1)
    yield name.replace(".weight", ".input_global_scale"), (3 + of_tensor).reshape(1)


def _mxfp4(name: str, weight: Any) -> Tensors:
    """compressed-tensors' MXFP4: 32 inputs share a power of two, as its exponent and 127."""
    import torch

    if not quantized.is_linear(name):
        yield name, weight
        return
    groups = weight.float().unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2, keepdim=True) / 6).clamp(min=2**-60).log2().ceil()
    yield f"{name}_packed", _fp4(groups / exponents.exp2())
    yield f"{name}_scale", (exponents.squeeze(2) + 127).to(torch.uint8)


def _fp4(groups: Any) -> Any:
    """Round to 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; two of them per byte, the first in the low bits."""
    import torch

    values = groups.flatten(1)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    codes = torch.bucketize(values.abs().contiguous(), bounds) + 8 * (values < 0)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def _compressed(kind: str, strategy: str, group: int, activations: bool) -> dict[str, Any]:
    values = dict(num_bits=4, type="float", symmetric=True, strategy=strategy, group_size=group)
    groups = dict(
        targets=["Linear"],
        weights={**values, "dynamic": False},
        input_activations={**values, "dynamic": "local"} if activations else None,
    )
    return dict(
        quant_method="compressed-tensors",
        format=f"{kind}-pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head", r"re:.*\.gate$"],
        config_groups=dict(group_0=groups),
    )


# Whole names, as published checkpoints have them.
GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(4)]
_FP8 = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", *GATES]}
SCHEMES: dict[str, tuple[Callable[[str, Any], Tensors], dict[str, Any]]] = {
    "block": (
        _block_fp8,
        {**_FP8, "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "static-kv": (_static_fp8, {**_FP8, "activation_scheme": "static"}),
    "nvfp4": (_nvfp4, _compressed("nvfp4", "tensor_group", 16, activations=True)),
    "mxfp4": (_mxfp4, _compressed("mxfp4", "group", 32, activations=False)),
    "w8a8-fp8": (_per_channel("fp8-channel"), {"quant_method": "w8a8_fp8"}),
    "w8a8-int8": (_per_channel("int8"), {"quant_method": "w8a8_int8", "is_dynamic": True}),
}
