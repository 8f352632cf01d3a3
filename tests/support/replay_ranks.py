"""One rank of verl's actor worker on a tiny Qwen3-MoE: ``python replay_ranks.py DIR CASES``, CASES a JSON file in DIR.

A case has a name, settings of verl, and whether the batch carries recorded experts. Writes ``NAME-RANK.pt``: the log-probabilities
of the answers, and the weights' step; the first rank writes ``wanted.pt``: log-probabilities by transformers alone."""

import json
import os
import sys
from pathlib import Path

import flow_lab
import torch
import torch.distributed as dist

import flashpatch

flashpatch.enable("grpo", loss=False)

from flashpatch.verify.probes.flowrl import tiny

folder, cases = Path(sys.argv[1]), json.loads((Path(sys.argv[1]) / sys.argv[2]).read_text())
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAYERS, EXPERTS, CHOSEN, DENSE = 3, 8, 3, 1


def model():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    made = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=tiny.VOCABULARY,
            hidden_size=tiny.WIDTH,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=LAYERS,
            mlp_only_layers=[DENSE],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
            norm_topk_prob=True,
            max_position_embeddings=256,
        )
    )
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return made.float()


def records(rows):
    """Per response, random distinct experts; nothing for the layer without a router and for the last token."""
    draw = torch.Generator().manual_seed(7)
    made = []
    for row in rows:
        tokens = len(row.prompt) + len(row.answer)
        ids = torch.rand((tokens, LAYERS, EXPERTS), generator=draw).argsort(-1)[..., :CHOSEN].to(torch.int16)
        ids[:, DENSE] = 0
        ids[-1] = 0
        made.append(ids)
    return made


def wanted(folder, rows, recorded):
    """Log-probabilities of all answers, where ``torch.topk`` returns the recorded experts to transformers' own code."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    original, found = torch.topk, []
    for row, ids in zip(rows, recorded, strict=True):
        layers = iter([layer for layer in range(LAYERS) if layer != DENSE])

        def topk(values, k, layers=layers, ids=ids, **kwargs):
            chosen = ids[:, next(layers)].long()
            return values.gather(-1, chosen), chosen

        torch.topk = topk
        try:
            with torch.no_grad():
                logs = plain(torch.tensor([[*row.prompt, *row.answer]])).logits[0].log_softmax(-1)
        finally:
            torch.topk = original
        at = torch.arange(len(row.prompt) - 1, len(row.prompt) + len(row.answer) - 1)
        found.append(logs[at, torch.tensor(row.answer)])
    return torch.cat(found)


source = folder / f"model-{rank}"
model().save_pretrained(source)
rows = tiny.responses()
recorded = records(rows)
for case in cases:
    settings = [f"trainer.n_gpus_per_node={ranks}", *case["settings"]]
    if case["record"]:
        settings.append("actor_rollout_ref.rollout.enable_rollout_routing_replay=True")
    worker = tiny.worker(tiny.recipe(source, *settings))

    def batch():
        made = tiny.batch(mine, whole=len(rows))
        if case["record"]:
            made["routed_experts"] = torch.nested.as_nested_tensor(own, layout=torch.jagged)
        return made

    share = 1 if any("ulysses" in setting for setting in settings) else ranks
    mine, own = (all_[rank % share :: share] for all_ in (rows, recorded))
    if found := flow_lab.stepped(worker, batch, mine):
        torch.save(found, folder / f"{case['name']}-{rank}.pt")
if rank == 0:
    torch.save(wanted(source, rows, recorded), folder / "wanted.pt")
dist.barrier()
dist.destroy_process_group()
