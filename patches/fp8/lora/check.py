"""Check the tensors of a LoRA adapter against the layers of the engine that is to hold it, and name their content."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.lora import values
from flashpatch.patches.fp8.update.events import listed


@dataclass(frozen=True)
class Pair:
    """One module's part of an adapter, which adds ``scaling * b @ a`` to its weight.

    Attributes:
        a: ``(rank, inputs)``, None if it did not come.
        b: ``(outputs, rank)``, None if it did not come.
        scaling: the factor that the engine will apply."""

    a: torch.Tensor | None
    b: torch.Tensor | None
    scaling: float


@dataclass(frozen=True)
class Place:
    """Size of the weight, whole, that a pair belongs to."""

    inputs: int
    outputs: int


def checked(
    name: str,
    pairs: Mapping[str, Pair],
    places: Mapping[str, Place | None],
    config: Mapping[str, Any],
    patch: str,
) -> str:
    """Return the digest of an adapter called ``name`` that the engine can hold; ``pairs``, ``places``, ``config`` as in
    `problems`. Raises PatchError, which names ``patch`` and all reasons, if the engine would not do with it what the
    trainer does."""
    finite, content = read(pairs)
    found = problems(pairs, finite, places, config)
    if found:
        raise PatchError(
            f"the LoRA adapter {name!r} is refused: {listed(found, '; ')}",
            patch=patch,
            advice="The adapter from before stays in place. Mend what the trainer sends, or the engine's lora settings.",
        )
    return digest(pairs, content)


def read(pairs: Mapping[str, Pair]) -> tuple[bool, bytes]:
    """Return what `values.read` says of all tensors of an adapter."""
    found = (one for _, pair in sorted(pairs.items()) for one in (pair.a, pair.b))
    return values.read([one for one in found if one is not None])


def problems(
    pairs: Mapping[str, Pair], finite: bool, places: Mapping[str, Place | None], config: Mapping[str, Any]
) -> list[str]:
    """Return what is wrong with an adapter, empty if nothing is.

    Args:
        pairs: by the engine's name of the module.
        finite: whether all values are known to be.
        places: modules of the engine that take an adapter; None for one whose size is not known.
        config: as PEFT writes it: ``r``, ``lora_alpha``, and what else changes what the tensors mean."""
    found = list(_unread(config))
    if not pairs:
        found.append("it has no tensors")
    ignored = [name for name in pairs if name not in places]
    if ignored:
        found.append(f"the engine has no place for {listed(ignored)}")
    wanted = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    for name, pair in pairs.items():
        for problem in _of_pair(pair, places.get(name), config["r"], wanted, finite):
            found.append(f"{name}: {problem}")
    return found


#: Settings of PEFT's ``LoraConfig`` that are read here, or mean nothing once an adapter is trained.
_HARMLESS = frozenset(
    "r lora_alpha use_rslora init_lora_weights lora_dropout target_modules exclude_modules layers_to_transform layers_pattern "
    "task_type peft_type peft_version base_model_name_or_path revision inference_mode auto_mapping runtime_config fan_in_fan_out "
    "loftq_config eva_config corda_config lora_ga_config megatron_config megatron_core qalora_group_size ensure_weight_tying".split()
)
_OWN_INITS = ("gaussian", "eva", "orthogonal")  # which leave the base as it is


def _unread(config: Mapping[str, Any]) -> Iterator[str]:
    """Name settings of PEFT that may change what an adapter does beyond its pairs: all that are set but `_HARMLESS`."""
    for name in sorted(config.keys() - _HARMLESS):
        if config[name] and (name, config[name]) != ("bias", "none"):
            yield f"{name}={config[name]} is not followed"
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _OWN_INITS:
        yield f"init_lora_weights={init!r} changes the base too: convert it by PEFT's path_initial_model_for_weight_conversion"


def _of_pair(pair: Pair, place: Place | None, rank: int, scaling: float, finite: bool) -> Iterator[str]:
    if pair.a is None or pair.b is None:
        yield f"lora_{'A' if pair.a is None else 'B'} did not come"
        return
    if pair.a.dim() != 2 or pair.b.dim() != 2:
        yield f"lora_A is {list(pair.a.shape)} and lora_B {list(pair.b.shape)}, not two matrices"
        return
    if (pair.a.shape[0], pair.b.shape[1]) != (rank, rank):
        yield f"lora_A is {list(pair.a.shape)} and lora_B {list(pair.b.shape)}, but r={rank}"
    elif place is not None and (pair.a.shape[1], pair.b.shape[0]) != (place.inputs, place.outputs):
        yield (
            f"lora_A is {list(pair.a.shape)} and lora_B {list(pair.b.shape)}, but the weight is "
            f"[{place.outputs}, {place.inputs}]"
        )
    if not math.isclose(pair.scaling, scaling, rel_tol=1e-6):
        yield f"the engine scales by {pair.scaling:g}, lora_alpha and r say {scaling:g}"
    if not (finite or (_finite(pair.a) and _finite(pair.b))):
        yield "holds NaN or infinity"


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; a NaN is the least and the largest of any values."""
    return not tensor.numel() or all(bool(torch.isfinite(bound)) for bound in tensor.aminmax())


def digest(pairs: Mapping[str, Pair], content: bytes) -> str:
    """Return a digest of what an adapter does, 16 hexadecimal digits: names, shapes, types, bits and scalings.
    ``pairs`` are by the engine's name of the module, ``content`` has all values, see `read`."""
    meant = [(name, pair.scaling, _kind(pair.a), _kind(pair.b)) for name, pair in sorted(pairs.items())]
    return hashlib.sha256(repr(meant).encode() + content).hexdigest()[:16]


def _kind(tensor: torch.Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def places_of(layers: Iterable[tuple[Any, Sequence[str]]]) -> Iterator[tuple[str, Place | None]]:
    """Yield the name of each part that can be adapted, and its place; None if its size is not known. ``layers``: each
    base layer, and the names of its parts, several if it is a fused one."""
    for base, parts in layers:
        outputs = list(_outputs(base)) if len(parts) > 1 else [getattr(base, "output_size", None)]
        inputs = getattr(base, "input_size", None)
        for at, part in enumerate(parts):
            known = inputs is not None and len(outputs) == len(parts) and outputs[at] is not None
            yield part, Place(inputs, outputs[at]) if known else None


def _outputs(base: Any) -> Iterator[int]:
    if hasattr(base, "total_num_kv_heads"):
        yield base.total_num_heads * base.head_size
        yield base.total_num_kv_heads * base.head_size
        yield base.total_num_kv_heads * getattr(base, "v_head_size", base.head_size)
    else:
        yield from getattr(base, "output_sizes", ())
