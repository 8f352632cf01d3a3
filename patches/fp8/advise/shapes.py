"""List the matrix products of one forward pass, from a model's config alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.calibration import structure, untrusted

PATCH = "fp8.advise"


@dataclass(frozen=True)
class Products:
    """Hold what a forward pass multiplies.

    Attributes:
        layers: (in features, out features) of the products that 8-bit rollout touches, to how many there are.
            Layers that read the same norm are one product, as engines fuse them.
        head: (in features, out features) of lm_head, which stays in bf16; None without one.
        weights: number of parameters of the model.
        touched: how many of them the products of ``layers`` hold.
    """

    layers: dict[tuple[int, int], int]
    head: tuple[int, int] | None
    weights: int
    touched: int


def of_model(path: Path) -> Products:
    """Return the products of the model in a directory; only ``config.json`` is read.

    Raises:
        PatchError: no config there, or an architecture that cannot be examined.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    untrusted.json_object(path / "config.json")
    kinds = structure.of_directory(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # whatever transformers makes of it
        raise PatchError(
            f"{path}: the architecture cannot be built ({type(error).__name__}: {str(error)[:200]}).",
            patch=PATCH,
            advice="Check config.json.",
        ) from error
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    linear = {
        name: (m.in_features, m.out_features)
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    layers: Counter[tuple[int, int]] = Counter()
    for prefix, exchanges in kinds.blocks(shapes).items():
        alone = {name for name in linear if name.startswith(prefix)}
        for exchange in exchanges:
            if exchange.offset is not None:
                together = [linear[name] for name in exchange.consumers]
                layers[together[0][0], sum(out for _, out in together)] += 1
                alone -= set(exchange.consumers)
        layers.update(linear[name] for name in alone)
    head = model.get_output_embeddings()
    return Products(
        dict(layers),
        None if head is None else (head.in_features, head.out_features),
        sum(p.numel() for p in model.parameters()),
        sum(k * n * count for (k, n), count in layers.items()),
    )
