"""Which checkpoints a drafter takes, without an engine."""

import pytest
import torch
from safetensors.torch import save_file

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.drafter_refit import checkpoint
from flashpatch.patches.eagle.vllm import drafter_refit


@pytest.fixture
def own(tmp_path):
    at = tmp_path / "own"
    at.mkdir()
    save_file({"fc.weight": torch.ones(2, 4), "layers.0.w": torch.ones(3)}, at / "model.safetensors")
    return at


def _check(own, tensors, shared=("embed_tokens", "lm_head")):
    checkpoint.check(tensors, own, set(shared), "new", "test")


def test_the_same_names_and_shapes_are_taken(own):
    _check(own, {"fc.weight": torch.zeros(2, 4), "layers.0.w": torch.zeros(3)})


@pytest.mark.parametrize(
    ("more", "less", "says"),
    [
        ({"embed_tokens.weight": torch.ones(3)}, (), "embed_tokens.weight, which this drafter shares"),
        ({"model.layers.0.w": torch.ones(3)}, (), "has model.layers.0.w, unknown to the drafter"),
        ({}, ("fc.weight",), "lacks fc.weight"),
        ({"fc.weight": torch.ones(4, 2)}, (), r"shape \(4, 2\), not \(2, 4\)"),
        ({"layers.0.w": torch.tensor([1.0, float("inf"), 0])}, (), "layers.0.w in new holds NaN or infinity"),
        ({f"x{n}": torch.ones(1) for n in range(7)}, (), "x0, x1, x2, x3 and 3 more"),
    ],
)
def test_others_are_refused_by_name(own, more, less, says):
    tensors = {"fc.weight": torch.zeros(2, 4), "layers.0.w": torch.zeros(3), **more}
    with pytest.raises(PatchError, match=says):
        _check(own, {name: tensor for name, tensor in tensors.items() if name not in less})


def test_an_embedding_of_its_own_is_taken(tmp_path):
    save_file({"embed_tokens.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    _check(tmp_path, {"embed_tokens.weight": torch.ones(2)}, shared=("lm_head",))


def test_a_checkpoint_may_be_several_files(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "2.safetensors")
    assert set(checkpoint.load(tmp_path, tmp_path, {"b"}, "test")) == {"a"}
    assert checkpoint.shapes(tmp_path) == {"a": (1,), "b": (2,)}
    with pytest.raises(PatchError, match="lacks a"):
        checkpoint.load(tmp_path / "2.safetensors", tmp_path, set(), "test")


def test_what_is_shared_is_out_of_reach_and_back_in_its_place():
    target = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3)})
    drafter = torch.nn.Module()
    drafter.model = torch.nn.Module()
    drafter.model.embed_tokens = target["embed"]
    drafter.model.fc = torch.nn.Linear(4, 2)
    drafter.lm_head = target["head"]
    before = list(drafter.state_dict())
    shared = drafter_refit._shared(drafter, target)
    assert sorted(name for _, name in shared) == ["embed_tokens", "lm_head"]
    with pytest.raises(RuntimeError), drafter_refit._detached(shared):
        assert list(drafter.state_dict()) == ["model.fc.weight", "model.fc.bias"]
        raise RuntimeError
    assert list(drafter.state_dict()) == before
    assert drafter.model.embed_tokens is target["embed"] and drafter.lm_head is target["head"]


def test_an_engine_without_a_drafter_says_so(tmp_path):
    with pytest.raises(PatchError, match="no drafter with weights"):
        drafter_refit.load_drafter(object(), tmp_path)
