"""Ulysses on two ranks without flash-attn, against one rank; tests/patches/flowrl/test_parity.py has verl's actor."""

import json
from pathlib import Path

import flow_lab
import grpo_lab
import pytest
import torch

from flashpatch.patches.cpu.ulysses import causal_mask

SUPPORT = Path(__file__).parents[2] / "support"


def test_a_token_sees_the_earlier_ones_of_its_own_sequence():
    seen = causal_mask(torch.tensor([0, 1, 2, 0, 1]))
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    near = causal_mask(torch.tensor([0, 1, 2, 0, 1]), window=2)
    assert (seen & ~near).nonzero().tolist() == [[2, 0]]


@pytest.mark.verl
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_attention_of_several_ranks_is_that_of_one(tmp_path, ranks):
    """Values and gradients, with fewer key heads than ranks, a window, and padding at the end of the row."""
    flow_lab.run_ranks([str(SUPPORT / "ulysses_ranks.py"), str(tmp_path)], tmp_path, ranks)
    found = [json.loads((tmp_path / f"attention-{rank}.json").read_text()) for rank in range(ranks)]
    for name in ("plain", "few key heads", "window"):
        assert max(max(one[name]["ours"]) for one in found) < 1e-5, name
        assert max(max(one[name]["stock"]) for one in found) > 1e-2, name


MODELS = """
    import json, sys
    from pathlib import Path
    sys.path.append(os.environ["SUPPORT"])
    import flashpatch
    flashpatch.enable("cpu", "bf16", "grpo")
    import stream_kinds as lab
    from flashpatch.patches.cpu.ulysses import _alone
    folder, seen = Path(str(rank)), [_alone([torch.nn.Linear(1, 1)])]
    for kind in {kinds}:
        batch, wanted = lab.write(folder, kind)
        try:
            seen.append(lab.shared(folder / kind, batch, wanted, {ranks}))
        except flashpatch.PatchError as error:
            seen.append(str(error))
    print(json.dumps(seen))
"""


@pytest.mark.verl
def test_a_model_that_mixes_the_sequences_of_a_packed_row_is_refused_on_one_rank(tmp_path):
    kinds = ("attention", "window", "opt", "falcon", "convolution", "chunks", "softcap")
    (said,) = grpo_lab.ranks(MODELS.format(kinds=kinds, ranks=1), tmp_path, 1, SUPPORT=str(SUPPORT))
    _, *right, opt, falcon, convolution, chunks, softcap = json.loads(said.strip().splitlines()[-1])
    assert max(right) < 1e-5
    assert "OPTForCausalLM mixes" in opt and "FalconForCausalLM mixes" in falcon
    assert "Llama4ForCausalLM mixes, or cuts" in chunks and "use_remove_padding=False" in chunks
    assert "Lfm2ForCausalLM mixes" in convolution
    assert "Gemma2Attention attends with softcap" in softcap and "attn_implementation=eager" in softcap


@pytest.mark.verl
def test_a_model_whose_ranks_share_a_row_is_right_or_refused_by_name(tmp_path):
    kinds = ("attention", "ministral", "persimmon", "window in the mask", "convolution", "lightning")
    kinds += ("own mask", "longrope", "dynamic")
    code = MODELS.format(kinds=kinds, ranks=2)
    for said in grpo_lab.ranks(code, tmp_path, 2, SUPPORT=str(SUPPORT)):
        linear, *right, convolution, lightning, mask, first, second = json.loads(
            said.strip().splitlines()[-1]
        )
        assert max(right) < 1e-5 and linear == "attends by functions of its own"
        assert "Lfm2ForCausalLM has a state or a convolution over the row" in convolution
        assert "MiniMaxForCausalLM has layers of kind linear_attention" in lightning
        assert "DogeAttention has a mask of its own" in mask
        assert "turns positions by the row's length" in first and "turns positions" in second
