"""Store one captured request: its tokens and the target's hidden states where each of them was the input."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashpatch.patches.eagle.errors import eagle_error

if TYPE_CHECKING:
    import torch

FORMAT = "flashpatch-eagle-1"


@dataclass(frozen=True)
class Sample:
    """Hold the training data of one request. All tensors are on the CPU.

    Attributes:
        request: the engine's request id.
        input_ids: int64 [n], the prompt and the accepted tokens.
        hidden: [n, H], the target's last hidden state (after the final norm: what ``lm_head`` reads) where
            ``input_ids[i]`` was the input; 0 where not `known`.
        known: bool [n], False where no state was seen: a prefix-cache hit, the last token of a request.
        response: bool [n], True for generated tokens.
        version: of the policy that computed every known state.
        auxiliary: [n, k*H], the layers EAGLE-3 reads, side by side, or None."""

    request: str
    input_ids: torch.Tensor
    hidden: torch.Tensor
    known: torch.Tensor
    response: torch.Tensor
    version: int
    auxiliary: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file. Raises OSError, or what safetensors raises in its place."""
        from safetensors.torch import save_file

        facts = {"format": FORMAT, "request": self.request, "version": str(self.version)}
        save_file({name: tensor.contiguous() for name, tensor in self._tensors().items()}, path, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sample:
        """Read a sample back. Raises PatchError if the file is missing, cut short, or is not a sample; it names the
        path."""
        from safetensors import safe_open

        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            if facts.get("format") != FORMAT:
                raise ValueError(f"its format is {facts.get('format')!r}, not {FORMAT!r}")
            sample = cls(request=facts["request"], version=int(facts["version"]), **tensors)
        except Exception as error:  # safetensors raises its own errors, OSError, or a panic's RuntimeError
            raise eagle_error(
                None, f"{Path(path)} cannot be read as a sample: {error}", "Delete it."
            ) from error
        return sample

    def _tensors(self) -> dict[str, torch.Tensor]:
        names = ("hidden", "auxiliary", "input_ids", "known", "response")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
