"""Compute one rank's part of a model under verl's Ulysses: ``torchrun -m flashpatch.verify.exact.ulysses ASKED.json``.

ASKED has ``checkpoint``, ``ids`` and ``answer``, the file to which the first rank writes the logits of ``ids``, [T - 1, V].
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from flashpatch.patches.cpu import ulysses as ours
from flashpatch.verify.exact.trainer import among_others


def main() -> None:
    """Compute it, in a process that torchrun started."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from verl.models.transformers.monkey_patch import apply_monkey_patch
    from verl.utils import ulysses

    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    attention = ALL_ATTENTION_FUNCTIONS[ours.IMPLEMENTATION]
    if not (isinstance(attention, functools.partial) and attention.func is ours.attention):
        raise RuntimeError(
            "verl's Ulysses needs flash-attn, and so a GPU; with cpu in FLASHPATCH it is torch's attention"
        )
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(
        asked["checkpoint"], dtype=torch.float32, attn_implementation=ours.IMPLEMENTATION
    ).eval()
    apply_monkey_patch(model, ulysses_sp_size=ranks)
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    row = torch.tensor(asked["ids"])
    inputs, positions, pad = ulysses.ulysses_pad_and_slice_inputs(*among_others(row), sp_size=ranks)
    with torch.no_grad():
        part = model(input_ids=inputs, attention_mask=None, position_ids=positions, use_cache=False).logits
    whole = ulysses.gather_outputs_and_unpad(part, gather_dim=1, unpad_dim=1, padding_size=pad)
    if dist.get_rank() == 0:
        torch.save(whole[0, len(row) : 2 * len(row) - 1].float(), asked["answer"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
