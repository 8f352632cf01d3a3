"""A profile is read as it was written or refused; so is a checkpoint, and no pickle is opened."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from flashpatch import PatchError
from flashpatch.patches.fp8.calibration import profile_file
from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint
from flashpatch.patches.fp8.calibration.structure import Exchange


def refused(call, *args) -> str:
    with pytest.raises(PatchError) as caught:
        call(*args)
    return str(caught.value)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A small valid profile."""
    exchange = Exchange("m.norm", 1.0, ("m.a", "m.b"), {"m.b": (0, 1, 0, 1)})
    shapes = {"m.norm.weight": (2,), "m.a.weight": (3, 2), "m.b.weight": (3, 4)}
    smooth, quantized = {"m.norm": torch.tensor([0.5, 2.0])}, frozenset({"m.a.weight"})
    profile = profile_file.Profile("int8", "channel", "f" * 64, shapes, (exchange,), smooth, quantized)
    profile_file.save(profile, tmp_path / "good.safetensors")
    return tmp_path / "good.safetensors"


def test_round_trip(good: Path) -> None:
    profile = profile_file.load(good)
    assert profile.exchanges == (Exchange("m.norm", 1.0, ("m.a", "m.b"), {"m.b": (0, 1, 0, 1)}),)
    assert profile.smooth["m.norm"].tolist() == [0.5, 2.0]
    assert profile.smoothed("m.b.weight", torch.ones(3, 4))[0].tolist() == [0.5, 2.0, 0.5, 2.0]
    assert profile.smoothed("m.norm.weight", torch.zeros(2)).tolist() == [1.0, -0.5]
    assert "shape" in refused(profile.smoothed, "m.a.weight", torch.ones(2, 2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, m: t["smooth/m.norm"].fill_(float("nan")), "not as it was written"),
        (lambda t, m: t.update({"smooth/m.norm": torch.ones(3)}), "not as it was written"),
        (lambda t, m: t.pop("index/m.b"), "not as it was written"),
        (lambda t, m: t.update({"extra": torch.ones(1)}), "not as it was written"),
        (lambda t, m: m.update(form="int4"), "not as it was written"),
        (lambda t, m: m.pop("shapes"), "not as it was written"),
        (lambda t, m: m.pop("digest"), "not as it was written"),
        (lambda t, m: m.update(format="other"), "not a profile"),
        (lambda t, m: m.update(version="99"), "version '99'"),
    ],
)
def test_a_changed_profile(good: Path, change, said: str) -> None:
    with safe_open(good, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    change(tensors, metadata)
    save_file(tensors, good, metadata)
    assert said in refused(profile_file.load, good)


@given(at=st.integers(0, 2000), value=st.binary(min_size=1, max_size=8))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_profile_is_refused_or_the_same(good: Path, at: int, value: bytes) -> None:
    data = bytearray(good.read_bytes())
    at %= len(data)
    data[at : at + len(value)] = value[: len(data) - at]
    path = good.with_name("damaged")
    path.write_bytes(data)
    try:
        profile = profile_file.load(path)
    except PatchError:
        return
    assert torch.equal(profile.smooth["m.norm"], torch.tensor([0.5, 2.0]))
    assert (profile.exchanges, profile.quantized) == (profile_file.load(good).exchanges, {"m.a.weight"})


def test_a_checkpoint_that_cannot_be_read(twins) -> None:
    model, _ = twins
    index = model / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    held["weight_map"]["more.weight"] = "absent.safetensors"
    for damaged in json.dumps(held), '{"weight_map": 5}', "[]", "\xff":
        index.write_text(damaged)
        assert "cannot be read" in refused(Checkpoint, str(model))


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    assert "Save the model with safetensors first" in refused(Checkpoint, str(tmp_path))
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    assert "cannot be read" in refused(Checkpoint, str(tmp_path))
    assert "cannot be read" in refused(profile_file.load, tmp_path / "model.safetensors")


def test_nothing_is_downloaded() -> None:
    assert "nothing is downloaded" in refused(Checkpoint, "some-org/some-model-that-is-not-here")
