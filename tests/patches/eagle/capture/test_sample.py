import pytest
import torch
from eagle_samples import equal, sample
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.torch import save_file

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


def test_views_of_larger_buffers_are_saved_as_they_look(tmp_path):
    buffer = torch.arange(64.0).view(8, 8)
    one = sample(4, width=3, hidden=buffer[2:6, 1:4])
    one.save(tmp_path / "one.safetensors")
    assert torch.equal(Sample.load(tmp_path / "one.safetensors").hidden, buffer[2:6, 1:4])


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "noise": lambda path: path.write_bytes(b"\xff" * 500),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "foreign": lambda path: save_file({"weight": torch.zeros(3)}, path),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_not_a_whole_sample_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "one.safetensors"
    sample().save(path)
    damage(path)
    with pytest.raises(PatchError, match="one.safetensors"):
        Sample.load(path)
