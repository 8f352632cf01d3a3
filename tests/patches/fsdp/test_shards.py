"""What ranks hold adds up to the whole, in every layout that FSDP has; and what names stand for."""

import json
import os

import pytest
import torch
import warm
from machine import limit
from tree import SUPPORT

from flashpatch.patches._shared import fingerprint
from flashpatch.patches.fsdp import shards

JOB = SUPPORT / "fsdp_shards_job.py"


@pytest.mark.slow
def test_shards_add_up_in_every_layout(tmp_path):
    """FSDP1 and FSDP2 on meshes of 2, 2 x 1 and 1 x 2: uneven rows, tied weights, buffers, original
    parameters kept or not, shards of columns."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FLASHPATCH": ""}
    done = warm.run_together(
        warm.TORCH,
        [([JOB, str(tmp_path), str(rank)], env) for rank in range(2)],
        cwd=tmp_path,
        timeout=limit(200),
    )
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr[-3000:]
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    assert len(seen[0]) == 11
    for layout, saw in seen[0].items():
        replicas = [0, 1] if "2x1" in layout else [0]
        assert saw["right"] == replicas and saw["names"], (layout, saw)
    total = sum(value.numel() for value in (torch.empty(7, 4), torch.empty(7)))
    assert seen[0]["none"]["held"] > total and seen[1]["none"]["held"] == 0
    assert seen[0]["fsdp2-1d"]["held"] + seen[1]["fsdp2-1d"]["held"] == seen[0]["none"]["held"]


def test_packed_experts_are_followed_into_their_parts():
    """verl takes ``[experts, 2 x inner, hidden]`` apart; each part is a range of the packed one."""
    experts, inner, hidden = 3, 5, 4
    packed = torch.randn(experts, 2 * inner, hidden)
    down = torch.randn(experts, hidden, inner)
    base = "model.layers.0.mlp.experts"
    whole = {f"{base}.gate_up_proj": packed, f"{base}.down_proj": down, "norm.weight": torch.randn(hidden)}
    cut = 17  # somewhere inside an expert
    ranks = [
        {
            name: shards.Own(tuple(value.shape), ((begin, value.view(-1)[begin:end]),))
            for name, value in whole.items()
            for begin, end in (
                [(0, min(cut, value.numel())), (min(cut, value.numel()), value.numel())][rank],
            )
        }
        for rank in range(2)
    ]
    known = shards.parts(ranks[0])
    exported = {"norm.weight": whole["norm.weight"]}
    for expert in range(experts):
        gate, up = packed.chunk(2, dim=1)
        exported[f"{base}.{expert}.gate_proj.weight"] = gate[expert]
        exported[f"{base}.{expert}.up_proj.weight"] = up[expert]
        exported[f"{base}.{expert}.down_proj.weight"] = down[expert]
    for name, value in {**whole, **exported}.items():
        part = known[name]
        sums = fingerprint.total([rank[part.of].sums(part.begin, part.end, torch.bfloat16) for rank in ranks])
        assert part.shape == tuple(value.shape)
        assert sums == fingerprint.of(value, dtype=torch.bfloat16), name
    assert set(known) == set(whole) | set(exported)


def test_what_is_offloaded_is_read_on_the_device_that_it_is_exported_on(monkeypatch):
    read = []
    monkeypatch.setattr(fingerprint, "of", lambda tensor, *of: read.append(tensor.device.type) or (0, 0))
    for values in (torch.ones(4), torch.ones(4, device="meta")):
        for device in (None, torch.device("cpu"), torch.device("meta")):
            shards.Own((4,), ((0, values),)).sums(0, 4, torch.bfloat16, device)
    assert read == ["cpu", "cpu", "meta"] + ["meta"] * 3


def test_what_is_still_being_offloaded_is_waited_for(monkeypatch):
    """verl's offload begins the copies to the host and goes on; shards that lie there are read next."""
    module = torch.nn.Linear(4, 4, bias=False)
    arriving = module.weight.detach().clone()
    module.weight.data.zero_()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: module.weight.data.copy_(arriving))
    mine = shards.own(module, shards.Place())["weight"]
    assert mine.sums(0, 16, torch.float32) == fingerprint.of(arriving)
