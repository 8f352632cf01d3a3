"""verl's own actor worker, and what its passes leave for a drafter, against transformers alone."""

from functools import partial

import flow_lab
import pytest
import torch
from flow_lab import FSDP1, FSDP2, MODEL, PACKED, RECOMPUTED

pytestmark = pytest.mark.verl


@pytest.fixture
def carry_out(tmp_path, monkeypatch):
    """Let ranks carry out cases, by name the model's family, whether states are taken, and settings of verl; return what the
    first rank found of each."""
    from drafter_lab import FAMILIES, make_target

    monkeypatch.setattr(
        flow_lab.torch, "load", partial(torch.load, weights_only=False)
    )  # of this test's processes
    for family in FAMILIES:
        make_target(family, num_hidden_layers=8).save_pretrained(tmp_path / family)

    def run(ranks, **cases):
        names = ("model", "captures", "settings")
        plan = [dict(name=name, **dict(zip(names, case, strict=True))) for name, case in cases.items()]
        return flow_lab.run_plan("eagle_pass.py", tmp_path, ranks, plan, FLASHPATCH="cpu,bf16")

    return run


def check(found, model):
    """Two passes are of the policy as it was, the third is of the one that was trained."""
    from transformers import AutoModelForCausalLM

    plain, rows = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), found["rows"]
    assert [one.version for one in found["samples"]] == [0] * 2 * len(rows) + [1] * len(rows)
    for place, one in enumerate(found["samples"]):
        if place == 2 * len(rows):
            plain.load_state_dict(found["weights"])
        tokens, (row,) = (
            one.input_ids.tolist(),
            [r for r in rows if [*r.prompt, *r.answer] == one.input_ids.tolist()],
        )
        with torch.no_grad():
            wanted = plain(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        assert one.known.all() and one.response.tolist() == [
            at >= len(row.prompt) for at in range(len(tokens))
        ]
        torch.testing.assert_close(one.hidden, wanted[-1][0], rtol=1e-3, atol=1e-3)
        inner = torch.cat([wanted[number][0] for number in (2, 4, 5)], -1)
        torch.testing.assert_close(one.auxiliary, inner, rtol=1e-3, atol=1e-3)


def test_states_are_those_of_transformers_and_the_step_is_stocks(carry_out, tmp_path):
    cases = dict(
        stock=("llama", False, [FSDP1]),
        llama=("llama", True, [FSDP1]),
        qwen2=("qwen2", True, [FSDP2, PACKED, RECOMPUTED]),
        qwen3=("qwen3", True, [FSDP1, PACKED]),
    )
    found = carry_out(1, **cases)
    for family in ("llama", "qwen2", "qwen3"):
        check(found[family], tmp_path / family)
    assert found["stock"]["samples"] == [] and torch.equal(found["stock"]["logs"], found["llama"]["logs"])
    assert all(
        torch.equal(step, found["llama"]["step"][name]) for name, step in found["stock"]["step"].items()
    )


@pytest.mark.full
def test_two_ranks_and_adapters(carry_out, tmp_path):
    adapters = [
        f"{MODEL}.lora_rank=4",
        f"{MODEL}.target_modules=all-linear",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    found = carry_out(2, shared=("qwen2", True, [FSDP1, PACKED]), lora=("qwen2", True, [FSDP2, *adapters]))
    check(found["shared"], tmp_path / "qwen2")
    versions = [one.version for one in found["lora"]["samples"]]
    assert versions == [0] * 8 + [1] * 4, "the reference's pass leaves nothing"
