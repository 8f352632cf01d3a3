"""Write the token embeddings and the head of a running target, which its drafter shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches._shared.atomic_file import replacing

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# bytes of a rank's rows that are gathered at once: the device never holds more of the others'
_BLOCK = 8 << 20


def save_embeddings_and_head(
    model: Any, folder: Path, gather: Callable[[Any], Any], is_first: bool, patch: str
) -> int:
    """Write both to ``folder/model.safetensors``, whole or not at all.

    Args:
        model: the engine's model of a worker, with ``model.embed_tokens`` and ``lm_head``; all tensor-parallel ranks
            call this together.
        folder: made if missing.
        gather: concatenates a tensor [rows, hidden] of each rank along the rows.
        is_first: whether this rank writes.
        patch: id of the patch that errors name.

    Returns:
        Tensors written, 0 in other ranks than the first.

    Raises:
        PatchError: the model has no such module, or it is not of plain floating point."""
    from safetensors.torch import save_file

    inner = getattr(model, "model", None)
    embedding, head = getattr(inner, "embed_tokens", None), getattr(model, "lm_head", None)
    if embedding is None or head is None:
        raise PatchError(
            f"{type(model).__name__} has no embed_tokens and lm_head to share with a drafter.",
            patch=patch,
            advice="Set eagle's option cotrain to false for this model.",
        )
    parts = (
        {_EMBEDDING: embedding} if head.weight is embedding.weight else {_EMBEDDING: embedding, _HEAD: head}
    )
    found = {name: _whole(module, gather, is_first, patch) for name, module in parts.items()}
    if not is_first:
        return 0
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as temporary:
        save_file(found, temporary)
    return len(found)


def _whole(module: Any, gather: Callable[[Any], Any], is_first: bool, patch: str) -> Any:
    """Gather [vocabulary, hidden] over tensor-parallel ranks, without padding, block by block into the host's memory; None in
    other ranks than the first."""
    import torch

    weight = module.weight.data
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise PatchError(
            f"{type(module).__name__} is stored as {weight.dtype}, which a drafter's trainer cannot read.",
            patch=patch,
            advice="Leave embeddings and head in the model's precision.",
        )
    blocks = []
    for rows in weight.split(max(1, _BLOCK // weight[:1].nbytes)):
        block = gather(rows).view(-1, *rows.shape)  # by rank
        blocks += [block.cpu()] if is_first else []
    return torch.cat(blocks, dim=1).flatten(0, 1)[: module.org_vocab_size] if is_first else None
