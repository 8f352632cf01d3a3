"""Keep a profile in a safetensors file: scales as tensors, the rest in the metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flashpatch.patches._shared.atomic_file import replacing
from flashpatch.patches.fp8.calibration.errors import refuse
from flashpatch.patches.fp8.calibration.structure import Exchange

if TYPE_CHECKING:
    import torch

FORMAT = "flashpatch.profile"
VERSION = "2"


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
    tensors = {f"smooth/{name}": s.contiguous().clone() for name, s in profile.smooth.items()}
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
    data = serialised(tensors, metadata | {"digest": _digest(metadata, tensors)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, private=False) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise refuse(path, f"cannot be written ({error})") from error


def load(path: Path) -> Profile:
    """Read a profile. Raises PatchError for a file of another kind or version, one that cannot be read, or one that is not as
    it was written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            said = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise refuse(path, f"cannot be read ({error})") from error
    if said.get("format") != FORMAT:
        raise refuse(path, "is safetensors, but not a profile", "Make one with 'flashpatch profile'.")
    if said.get("version") != VERSION:
        raise refuse(
            path,
            f"is a profile of version {str(said.get('version'))[:20]!r}, this is {VERSION!r}",
            "Make it again with this FlashPatch.",
        )
    if said.pop("digest", "") != _digest(said, tensors):
        raise refuse(
            path, "is not as it was written", "Copy it again, or make it again with 'flashpatch profile'."
        )
    exchanges = []
    for producer, offset, consumers in json.loads(said["exchanges"]):
        index = {c: tuple(tensors[f"index/{c}"].tolist()) for c in consumers if f"index/{c}" in tensors}
        exchanges.append(Exchange(producer, offset, tuple(consumers), index))
    return Profile(
        said["form"],
        said["granularity"],
        said["fingerprint"],
        {name: tuple(shape) for name, shape in json.loads(said["shapes"]).items()},
        tuple(exchanges),
        {e.producer: tensors[f"smooth/{e.producer}"] for e in exchanges},
        frozenset(json.loads(said["quantized"])),
    )


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of all that a profile's file holds."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
