"""Read from an engine's layers how large the weights are that the parts of an adapter belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flashpatch.patches.fp8.lora.check import Place


def of(layers: Iterable[tuple[Any, Sequence[str]]]) -> Iterator[tuple[str, Place | None]]:
    """Yield the name of each part that can be adapted, and its place; None if its size is not known.

    Args:
        layers: each base layer, and the names of its parts: several if it is a fused one.
    """
    for base, parts in layers:
        outputs = list(_outputs(base)) if len(parts) > 1 else [getattr(base, "output_size", None)]
        inputs = getattr(base, "input_size", None)
        for at, part in enumerate(parts):
            known = inputs is not None and len(outputs) == len(parts) and outputs[at] is not None
            yield part, Place(inputs, outputs[at]) if known else None


def _outputs(base: Any) -> Iterator[int]:
    """Yield the whole sizes of a fused layer's parts."""
    if hasattr(base, "total_num_kv_heads"):
        yield base.total_num_heads * base.head_size
        yield base.total_num_kv_heads * base.head_size
        yield base.total_num_kv_heads * getattr(base, "v_head_size", base.head_size)
    else:
        yield from getattr(base, "output_sizes", ())
