"""Keep a profile in a safetensors file: scales as tensors, the rest in the metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flashpatch.patches._shared.atomic_file import replacing
from flashpatch.patches.fp8.calibration import untrusted
from flashpatch.patches.fp8.calibration.structure import Exchange
from flashpatch.patches.fp8.calibration.untrusted import refuse

if TYPE_CHECKING:
    import torch

FORMAT = "flashpatch.profile"
VERSION = "1"
FORMS = ("int8", "fp8")
GRANULARITIES = ("channel", "tensor")
_UNUSED = "weight_scale/"  # tensors in profiles that earlier versions made

_KEYS = frozenset(
    {"format", "version", "form", "granularity", "fingerprint", "shapes", "exchanges", "quantized"}
)


@dataclass(frozen=True)
class Profile:
    """Hold how a bf16 model becomes a quantized one that computes the same function.

    The scale ``s`` of an exchange divides the producer's output channels (for a norm, ``offset + weight``)
    and multiplies the input channels of every consumer, so what the model computes does not change, whatever
    its weights are by now. Then the weights in ``quantized`` are rounded.

    Attributes:
        form: ``int8`` or ``fp8`` (e4m3).
        granularity: one weight scale per output ``channel``, or per ``tensor``.
        fingerprint: of the model's tensor names and shapes, see `Checkpoint.fingerprint`; empty if unknown.
        shapes: name to shape of every tensor that the profile touches.
        exchanges: what exchanges scales with what.
        smooth: producer to ``s``, float32 [channels], positive.
        quantized: names of the weights that are rounded."""

    form: str
    granularity: str
    fingerprint: str
    shapes: Mapping[str, tuple[int, ...]]
    exchanges: tuple[Exchange, ...]
    smooth: Mapping[str, torch.Tensor]
    quantized: frozenset[str]

    def smoothed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor of the bf16 model becomes before it is rounded.

        Args:
            name: its name in the checkpoint.
            tensor: its values, any floating dtype and device.

        Returns:
            ``tensor`` itself if no scale touches it; else a new tensor, float32 for weights that are rounded
            afterwards and of the same dtype for the others.

        Raises:
            PatchError: the shape is not the one the profile was made for."""
        if name in self.shapes and tuple(tensor.shape) != self.shapes[name]:
            raise refuse(
                name,
                f"has shape {list(tensor.shape)}, the profile was made for {list(self.shapes[name])}",
                "Make a profile of this model.",
            )
        inward, outward, offset = self.scales(name)
        if inward is None and outward is None:
            return tensor
        new = tensor.float()
        if inward is not None:
            new = new * inward.to(new.device)
        if outward is not None:
            scale = outward.to(new.device)
            new = (new + offset) / (scale if new.dim() == 1 else scale[:, None]) - offset
        return new if name in self.quantized else new.to(tensor.dtype)

    def scales(self, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        """Return, for a tensor, what multiplies its input channels, what divides its output channels, and the offset."""
        module, _, kind = name.rpartition(".")
        inward = outward = None
        offset = 0.0
        for exchange in self._touching.get(module, ()):
            if exchange.producer == module and kind in ("weight", "bias"):
                outward = self.smooth[exchange.producer]
                offset = (exchange.offset or 0.0) if kind == "weight" else 0.0
            elif module in exchange.consumers and kind == "weight":
                scale = self.smooth[exchange.producer]
                inward = scale[list(exchange.index[module])] if module in exchange.index else scale
        return inward, outward, offset

    @cached_property
    def _touching(self) -> dict[str, list[Exchange]]:
        found: dict[str, list[Exchange]] = {}
        for exchange in self.exchanges:
            for module in (exchange.producer, *exchange.consumers):
                found.setdefault(module, []).append(exchange)
        return found


def save(profile: Profile, path: Path, overwrite: bool = False) -> None:
    """Write a profile; a reader sees meanwhile the old file or the new one. Raises PatchError if the file exists and
    may not be overwritten, or cannot be written."""
    import torch
    from safetensors.torch import save as serialised

    if path.exists() and not overwrite:
        raise refuse(path, "exists", "Remove it, choose another with -o, or say --force.")
    tensors = {f"smooth/{name}": s for name, s in profile.smooth.items()}
    for exchange in profile.exchanges:
        for consumer, index in exchange.index.items():
            tensors[f"index/{consumer}"] = torch.tensor(index, dtype=torch.int32)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "form": profile.form,
        "granularity": profile.granularity,
        "fingerprint": profile.fingerprint,
        "shapes": json.dumps({name: list(shape) for name, shape in profile.shapes.items()}),
        "exchanges": json.dumps([[e.producer, e.offset, list(e.consumers)] for e in profile.exchanges]),
        "quantized": json.dumps(sorted(profile.quantized)),
    }
    data = serialised({name: t.contiguous().clone() for name, t in tensors.items()}, metadata)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, private=False) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise refuse(path, f"cannot be written ({error})") from error


def load(path: Path) -> Profile:
    """Read a profile and check all of it. Raises PatchError for a file of another kind, version or size, tensors
    missing or left over, wrong shapes or dtypes, scales that are zero, negative or not finite, names that are no tensor
    names."""
    with untrusted.safetensors(path, untrusted.PROFILE_LIMIT) as file:
        said = file.metadata() or {}
        tensors = {n: file.get_tensor(n) for n in file.keys() if not n.startswith(_UNUSED)}  # noqa: SIM118
    if said.get("format") != FORMAT:
        raise refuse(path, "is safetensors, but not a profile", "Make one with 'flashpatch profile'.")
    if said.get("version") != VERSION:
        raise refuse(
            path,
            f"is a profile of version {str(said.get('version'))[:20]!r}, this is {VERSION!r}",
            "Make it again with this FlashPatch.",
        )
    if set(said) != _KEYS:
        raise refuse(path, f"has not the metadata of a profile: {', '.join(sorted(set(said) ^ _KEYS)[:4])}")
    for key, allowed in (("form", FORMS), ("granularity", GRANULARITIES)):
        if said[key] not in allowed:
            raise refuse(path, f"has {key} {said[key][:20]!r}, not one of {', '.join(allowed)}")
    try:
        profile = _parsed(said, tensors, path)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise refuse(
            path, f"has metadata and tensors that do not fit ({type(error).__name__}: {str(error)[:80]})"
        ) from error
    if tensors:
        raise refuse(path, f"holds tensors that belong to nothing: {', '.join(sorted(tensors)[:4])}")
    check(profile, path)
    return profile


def check(profile: Profile, path: Path | str) -> None:
    """Check all that must hold between the parts of a profile, wherever it comes from; ``path`` is for the message.
    Raises PatchError if shapes, dtypes, indices or scales are wrong."""

    def shape(name: str, dims: int) -> tuple[int, ...]:
        found = profile.shapes.get(name)
        if found is None or len(found) != dims:
            raise refuse(path, f"has no {dims}-dimensional shape for {name}")
        return found

    consumers = [c for e in profile.exchanges for c in e.consumers]
    producers = [e.producer for e in profile.exchanges]
    if len(set(consumers)) < len(consumers) or len(set(producers)) < len(producers):
        raise refuse(path, "lets a layer exchange twice")
    for exchange in profile.exchanges:
        if exchange.offset not in (None, 0.0, 1.0) or not exchange.consumers:
            raise refuse(
                path, f"has an exchange {exchange.producer}, {exchange.offset}, {exchange.consumers}"
            )
        (width,) = shape(f"{exchange.producer}.weight", 2 if exchange.offset is None else 1)[:1]
        _check_scale(profile.smooth[exchange.producer], (width,), f"smooth/{exchange.producer}", path)
        for consumer in exchange.consumers:
            fed = shape(f"{consumer}.weight", 2)[1]
            index = exchange.index.get(consumer)
            if fed != (width if index is None else len(index)):
                raise refuse(path, f"feeds {width} channels of {exchange.producer} to {fed} of {consumer}")
            if index is not None and not all(
                type(channel) is int and 0 <= channel < width for channel in index
            ):
                raise refuse(path, f"feeds {consumer} from channels that {exchange.producer} does not have")
    for name in profile.quantized:
        shape(name, 2)


def _check_scale(scale: torch.Tensor, wanted: tuple[int, ...], name: str, path: Path | str) -> None:
    import torch

    if scale.dtype != torch.float32 or tuple(scale.shape) != wanted:
        raise refuse(
            path,
            f"{name} is {str(scale.dtype).removeprefix('torch.')} {list(scale.shape)}, not float32 {list(wanted)}",
        )
    if not bool(torch.isfinite(scale).all()) or not bool((scale > 0).all()):
        bad = scale[~(torch.isfinite(scale) & (scale > 0))][0].item()
        raise refuse(path, f"{name} holds {bad}, and a scale must be positive and finite")


def _parsed(said: Mapping[str, str], tensors: dict[str, torch.Tensor], path: Path) -> Profile:
    """Return the profile of a file's metadata and tensors; the tensors that belong to it are taken out."""
    written = {key: json.loads(said[key]) for key in ("shapes", "exchanges", "quantized")}
    exchanges = []
    for producer, offset, consumers in written["exchanges"]:
        index = {c: tuple(tensors.pop(f"index/{c}").tolist()) for c in consumers if f"index/{c}" in tensors}
        exchanges.append(Exchange(producer, offset, tuple(consumers), index))
    for name in (*written["shapes"], *(name for e in exchanges for name in (e.producer, *e.consumers))):
        untrusted.tensor_name(name, path)
    return Profile(
        said["form"],
        said["granularity"],
        said["fingerprint"],
        {name: tuple(map(int, dims)) for name, dims in written["shapes"].items()},
        tuple(exchanges),
        {e.producer: tensors.pop(f"smooth/{e.producer}") for e in exchanges},
        frozenset(written["quantized"]),
    )
