"""One rank of an attention that is split over several: ``python ulysses_ranks.py DIR``, with ``cpu`` on.

Writes, as one JSON object, ``attention-RANK.json``: by how much this rank's part of the output and of each input's gradient differs from the
whole attention's, relative to the largest value: with the patch, and with transformers' own function."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verl.models.transformers import monkey_patch  # noqa: F401  # what the patch waits for
from verl.utils.ulysses import set_ulysses_sequence_parallel_group

from flashpatch.patches.cpu.ulysses import causal_mask

folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HEADS, WIDTH = 8, 16
LENGTHS = (7, 2, 5, 1, 5)  # the last sequence is padding
CASES = {"plain": (4, None), "few key heads": (1, None), "window": (4, 3)}  # heads of the keys, window


def attend(function, parts, positions, window, mask=None):
    """Output, and gradients of a fixed sum of it."""
    parts = [part.detach().clone().requires_grad_() for part in parts]
    module = SimpleNamespace(num_key_value_groups=HEADS // parts[1].shape[1], is_causal=True)
    out, _ = function(module, *parts, mask, scaling=0.3, position_ids=positions, sliding_window=window)
    factors = torch.linspace(-1, 1, HEADS * WIDTH).view(HEADS, WIDTH)
    (out * factors * (1 + positions[0].view(1, -1, 1, 1))).sum().backward()
    return [out.detach(), *(part.grad for part in parts)]


def mine(tensor, dim):
    return tensor.chunk(ranks, dim)[rank]


dist.init_process_group("gloo", init_method=os.environ["DIST_INIT_METHOD"], rank=rank, world_size=ranks)
torch.manual_seed(0)
positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
found = {}
for name, (key_heads, window) in CASES.items():
    whole = [torch.randn(1, heads, sum(LENGTHS), WIDTH) for heads in (HEADS, key_heads, key_heads)]
    mask = causal_mask(positions[0], window)[None, None]
    wanted = attend(sdpa_attention_forward, whole, positions, window, mask)
    wanted = [mine(part, 1 if at == 0 else 2) for at, part in enumerate(wanted)]
    own = [mine(part, 2).contiguous() for part in whole], mine(positions, 1).contiguous()
    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    patched = attend(ALL_ATTENTION_FUNCTIONS["sdpa"], *own, window)
    set_ulysses_sequence_parallel_group(None)
    stock = attend(sdpa_attention_forward, *own, window)
    found[name] = {
        who: [float((a - b).abs().max() / b.abs().max()) for a, b in zip(seen, wanted, strict=True)]
        for who, seen in (("ours", patched), ("stock", stock))
    }
dist.barrier()
(folder / f"attention-{rank}.json").write_text(json.dumps(found))
