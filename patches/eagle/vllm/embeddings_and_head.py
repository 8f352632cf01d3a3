"""Write the token embeddings and the head of a running worker's target, which its drafter shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashpatch.atomic_file import replacing
from flashpatch.errors import PatchError

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save_embeddings_and_head(model: Any, folder: Path) -> int:
    """Write both to ``folder/model.safetensors``, whole or not at all.

    Args:
        model: vLLM's model of a worker; all tensor-parallel ranks call this together.
        folder: made if missing.

    Returns:
        Tensors written, 0 in other ranks than the first.

    Raises:
        PatchError: the model has no such module, or it is not of plain floating point.
    """
    from safetensors.torch import save_file
    from vllm.distributed.parallel_state import get_tp_group

    found = dict(_embeddings_and_head(model))
    if get_tp_group().rank_in_group:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as temporary:
        save_file(found, temporary)
    return len(found)


def _embeddings_and_head(model: Any) -> Any:
    """Yield names and whole tensors on the host; a head that is tied to the embeddings is left out."""
    inner = getattr(model, "model", None)
    embedding, head = getattr(inner, "embed_tokens", None), getattr(model, "lm_head", None)
    if embedding is None or head is None:
        raise PatchError(
            f"{type(model).__name__} has no embed_tokens and lm_head to share with a drafter.",
            patch="eagle.vllm.worker",
            advice="Set eagle's option cotrain to false for this model.",
        )
    yield _EMBEDDING, _gather(embedding)
    if head.weight is not embedding.weight:
        yield _HEAD, _gather(head)


def _gather(module: Any) -> Any:
    """Gather [vocabulary, hidden] over tensor-parallel ranks, without padding."""
    from vllm.distributed import tensor_model_parallel_all_gather

    weight = module.weight
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise PatchError(
            f"{type(module).__name__} is stored as {weight.dtype}, which a drafter's trainer cannot read.",
            patch="eagle.vllm.worker",
            advice="Leave embeddings and head in the model's precision.",
        )
    whole = tensor_model_parallel_all_gather(weight.data, dim=0)
    return whole[: module.org_vocab_size].cpu().contiguous().clone()
