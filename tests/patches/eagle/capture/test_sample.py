from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from eagle_samples import equal, sample
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.torch import load_file, save_file

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.capture.sample import Sample


@settings(max_examples=40)
@given(
    n=some.integers(0, 9),
    width=some.integers(1, 5),
    dtype=some.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    layers=some.integers(0, 3),
    name=some.text(max_size=12),
)
def test_a_sample_comes_back_as_it_was(tmp_path_factory, n, width, dtype, layers, name):
    path = tmp_path_factory.mktemp("sample") / "one.safetensors"
    auxiliary = torch.randn(n, layers * width).to(dtype) if layers else None
    one = sample(n, seed=n, width=width, dtype=dtype, auxiliary=auxiliary, request=name)
    one.save(path)
    assert equal(Sample.load(path), one)


def test_the_file_is_safetensors_for_everybody_else(tmp_path):
    one = sample()
    one.save(tmp_path / "one.safetensors")
    tensors = load_file(tmp_path / "one.safetensors")
    assert torch.equal(tensors["hidden"], one.hidden) and torch.equal(tensors["known"], one.known)


def test_views_of_larger_buffers_are_saved_as_they_look(tmp_path):
    buffer = torch.arange(64.0).view(8, 8)
    one = sample(4, width=3, hidden=buffer[2:6, 1:4])
    one.save(tmp_path / "one.safetensors")
    assert torch.equal(Sample.load(tmp_path / "one.safetensors").hidden, buffer[2:6, 1:4])


def _cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def _noise(path):
    path.write_bytes(b"\xff" * 500)


def _empty(path):
    path.write_bytes(b"")


def _foreign(path):
    save_file({"weight": torch.zeros(3)}, path)


def _short(path):
    one = sample()
    sample(hidden=one.hidden[:-1]).save(path)


def _wrong_kind(path):
    sample(known=torch.zeros(7, dtype=torch.int64)).save(path)


@pytest.mark.parametrize("damage", [_cut, _noise, _empty, _foreign, _short, _wrong_kind])
def test_what_is_not_a_whole_sample_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "one.safetensors"
    sample().save(path)
    damage(path)
    with pytest.raises(PatchError, match="one.safetensors cannot be read as a sample"):
        Sample.load(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(PatchError, match="gone.safetensors"):
        Sample.load(tmp_path / "gone.safetensors")
