"""Load what a drafter shares with its target and never trains: token embeddings and output head."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from flashpatch.patches._shared.checkpoint_shapes import files
from flashpatch.patches.eagle.errors import eagle_error

NAMES = dict.fromkeys(("model.embed_tokens.weight", "embed_tokens.weight"), "embedding") | {
    "lm_head.weight": "head"
}


class TargetEmbeddings:
    """Hold embeddings and head of the target, both [vocabulary, hidden]; one tensor if the target ties them."""

    def __init__(self, embedding: Tensor, head: Tensor | None = None) -> None:
        self.embedding = embedding.detach()
        self.head = self.embedding if head is None else head.detach()
        if self.embedding.shape != self.head.shape:
            raise eagle_error(
                "drafter",
                f"the target embeds {tuple(self.embedding.shape)} and its head is {tuple(self.head.shape)}.",
                "A drafter shares both, so they must have one shape.",
            )

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TargetEmbeddings:
        """Read both from a target's safetensors checkpoint. Raises PatchError if no safetensors checkpoint is there, or
        it has no embeddings."""
        from safetensors import safe_open

        found = {}
        for file in files(Path(folder)):
            with safe_open(file, framework="pt") as opened:
                for name in NAMES.keys() & set(opened.keys()):
                    found[NAMES[name]] = opened.get_tensor(name)
        if "embedding" not in found:
            raise eagle_error(
                "drafter",
                f"{folder} has no {next(iter(NAMES))} in safetensors files.",
                "Give the folder of the target's checkpoint.",
            )
        return cls(found["embedding"], found.get("head"))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> TargetEmbeddings:
        """Return both on another device or in another precision."""
        embedding = self.embedding.to(device, dtype)
        return TargetEmbeddings(
            embedding, None if self.head is self.embedding else self.head.to(device, dtype)
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings [..., hidden] of integer ids."""
        return F.embedding(ids, self.embedding)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [..., vocabulary] of states [..., hidden]."""
        return F.linear(states.to(self.head.dtype), self.head)
