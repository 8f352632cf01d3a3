"""Write the token embeddings and the head of a running worker's target, which its drafter shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashpatch.patches.eagle.drafter_refit import embeddings_and_head


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
    from vllm.distributed import tensor_model_parallel_all_gather
    from vllm.distributed.parallel_state import get_tp_group

    return embeddings_and_head.save_embeddings_and_head(
        model,
        folder,
        lambda weight: tensor_model_parallel_all_gather(weight, dim=0),
        get_tp_group().rank_in_group == 0,
        "eagle.vllm.worker",
    )
