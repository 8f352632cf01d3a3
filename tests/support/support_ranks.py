"""One rank of verl's actor worker that gets kept ids: ``python support_ranks.py DIR CASES``, CASES a JSON file in DIR.

A case has a name, settings of verl, and whether the batch carries kept ids. Writes ``NAME-RANK.pt``: the log-probabilities of the
answers, and the weights' step; the first rank writes ``wanted.pt``: both by transformers alone, with a softmax over the
kept tokens only."""

import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import flow_lab
import torch
import torch.distributed as dist

from flashpatch.verify.probes.flowrl import tiny

folder, cases = Path(sys.argv[1]), json.loads((Path(sys.argv[1]) / sys.argv[2]).read_text())
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDTH, LIKELIEST = 8, 5
WHOLE = "actor_rollout_ref.rollout.top_k=5"


def drawn(plain, row):
    """Per token of the answer the likeliest ids and its own, filled up; the second token is a tool's and has none."""
    with torch.no_grad():
        logits = plain(torch.tensor([[*row.prompt, *row.answer]])).logits[0]
    ids = torch.full((len(row.answer), WIDTH), -1, dtype=torch.int32)
    for at, token in enumerate(row.answer):
        top = logits[len(row.prompt) - 1 + at].topk(LIKELIEST).indices.tolist()
        kept = sorted({*top, token})
        ids[at, : len(kept)] = torch.tensor(kept)
    if len(row.answer) > 2:
        ids[1] = -1
    return ids


def logs_of(plain, row, ids):
    """Log-probabilities of an answer's tokens by definition: other logits are minus infinity; 0 without ids."""
    logits = plain(torch.tensor([[*row.prompt, *row.answer]])).logits[0, len(row.prompt) - 1 : -1]
    found = []
    for one, token, kept in zip(logits, row.answer, ids, strict=True):
        kept = kept[kept >= 0].long()
        only = torch.full_like(one, -math.inf).index_put((kept,), one[kept])
        found.append(only.log_softmax(-1)[token] if len(kept) else one.sum() * 0)
    return torch.stack(found)


def reference(folder, rows, kept):
    """Log-probabilities, and the gradient of minus their advantages' mean over the tokens trained on."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    logs = [logs_of(plain, row, ids) for row, ids in zip(rows, kept, strict=True)]
    tokens = sum(int((ids[:, 0] >= 0).sum()) for ids in kept)
    loss = -sum(one.sum() * row.reward for one, row in zip(logs, rows, strict=True)) / tokens
    loss.backward()
    steps = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    return [one.detach() for one in logs], steps


source = tiny.write_model(folder / f"model-{rank}")
rows = tiny.responses()
from transformers import AutoModelForCausalLM

plain = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
kept = [drawn(plain, row) for row in rows]
logs, steps = reference(source, rows, kept)
rows = [dataclasses.replace(row, old=one.tolist()) for row, one in zip(rows, logs, strict=True)]
for case in cases:
    worker = tiny.worker(tiny.recipe(source, f"trainer.n_gpus_per_node={ranks}", WHOLE, *case["settings"]))
    share = 1 if any("ulysses" in setting for setting in case["settings"]) else ranks
    mine, own = (all_[rank % share :: share] for all_ in (rows, kept))

    def batch():
        made = tiny.batch(mine, whole=len(rows))
        masks = [(ids[:, 0] >= 0).long() for ids in own]
        for name in ("response_mask", "loss_mask"):
            made[name] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
        if case["kept"]:
            made["kept_ids"] = torch.nested.as_nested_tensor(own, layout=torch.jagged)
        return made

    if found := flow_lab.stepped(worker, batch, mine):
        found["logs"] = found["logs"][torch.cat([ids[:, 0] >= 0 for ids in own])]
        torch.save(found, folder / f"{case['name']}-{rank}.pt")
if rank == 0:
    known = torch.cat([ids[:, 0] >= 0 for ids in kept])
    torch.save({"logs": torch.cat(logs)[known], "step": steps}, folder / "wanted.pt")
dist.barrier()
dist.destroy_process_group()
