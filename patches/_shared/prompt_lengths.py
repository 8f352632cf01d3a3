"""Read the lengths of the prompts of verl's micro-batches."""

from __future__ import annotations

from typing import Any


def prompt_lengths(micro_batch: Any) -> Any:
    """Return the tokens of each prompt, int64 [batch], by the lengths that verl splits by
    (``verl/workers/utils/padding.py: no_padding_2_padding``)."""
    prompts = micro_batch["prompts"]
    if prompts.is_nested:
        return prompts.offsets().diff()
    return micro_batch["attention_mask"][:, : prompts.shape[1]].sum(1)
