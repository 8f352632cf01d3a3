"""DeepSeek's attention on CPUs with AMX, which throws weights away that an update would need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashpatch.errors import PatchError

if TYPE_CHECKING:
    import torch


def refuse(model: torch.nn.Module, patch: str) -> None:
    """Refuse a model on vLLM's backend AMX_MLA.

    It packs the weight of ``kv_b_proj`` into the attention's own memory and frees the weight itself: a later
    load finds no place for it.

    Args:
        model: just constructed, nothing loaded.
        patch: who refuses.

    Raises:
        PatchError: an attention layer of ``model`` runs on AMX_MLA.
    """
    for name, module in model.named_modules():
        if getattr(getattr(module, "impl", None), "uses_amx_bmm", False):
            raise PatchError(
                f"{name} runs on the attention backend AMX_MLA, whose weights cannot be updated in place.",
                patch=patch,
                advice="Open the engine with attention_backend='CPU_MLA' (--attention-backend CPU_MLA).",
            )
