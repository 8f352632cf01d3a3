"""Files from elsewhere: refused with one clear error, before much is read, and nothing in them is
executed."""

import json
import os
import pickle
import struct
from pathlib import Path

import profile_lab
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

GIB = 1 << 30


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


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


def rewritten(path: Path, change) -> Path:
    """``path`` with ``change(tensors, metadata)`` applied."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    return path


class TestProfile:
    def test_round_trip(self, good: Path) -> None:
        profile = profile_file.load(good)
        assert profile.exchanges == (Exchange("m.norm", 1.0, ("m.a", "m.b"), {"m.b": (0, 1, 0, 1)}),)
        assert profile.smooth["m.norm"].tolist() == [0.5, 2.0]
        assert profile.smoothed("m.b.weight", torch.ones(3, 4))[0].tolist() == [0.5, 2.0, 0.5, 2.0]
        assert profile.smoothed("m.norm.weight", torch.zeros(2)).tolist() == [1.0, -0.5]
        assert "shape" in refused(profile.smoothed, "m.a.weight", torch.ones(2, 2))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda t, m: t["smooth/m.norm"].fill_(float("nan")), "smooth/m.norm holds nan"),
            (lambda t, m: t["smooth/m.norm"].fill_(float("inf")), "holds inf"),
            (lambda t, m: t["smooth/m.norm"].zero_(), "holds 0.0"),
            (lambda t, m: t["smooth/m.norm"].neg_(), "must be positive"),
            (lambda t, m: t.update({"smooth/m.norm": torch.ones(3)}), "float32 [3], not float32 [2]"),
            (
                lambda t, m: t.update({"smooth/m.norm": torch.ones(2).double()}),
                "float64 [2], not float32 [2]",
            ),
            (lambda t, m: t.pop("smooth/m.norm"), "do not fit (KeyError: 'smooth/m.norm'"),
            (lambda t, m: t.pop("index/m.b"), "feeds 2 channels of m.norm to 4 of m.b"),
            (lambda t, m: t.update({"index/m.b": torch.tensor([0, 1, 0, 2]).int()}), "does not have"),
            (lambda t, m: t.update({"index/m.b": torch.tensor([0, -1, 0, 1]).int()}), "does not have"),
            (lambda t, m: t.update({"index/m.b": torch.ones(4)}), "does not have"),
            (lambda t, m: t.update({"extra": torch.ones(1)}), "belong to nothing: extra"),
            (lambda t, m: m.update(format="other"), "not a profile"),
            (lambda t, m: m.update(version="99"), "version '99'"),
            (lambda t, m: m.update(form="int4"), "has form 'int4'"),
            (lambda t, m: m.update(more="x"), "has not the metadata of a profile: more"),
            (lambda t, m: m.pop("shapes"), "has not the metadata of a profile: shapes"),
            (lambda t, m: m.update(exchanges='[[["m"], 1.0, ["m.a"]]]'), "names a tensor"),
            (lambda t, m: m.update(quantized='[["m.a.weight"]]'), "do not fit"),
            (lambda t, m: m.update(shapes='{"../../etc/passwd": [1]}'), "names a tensor '../../etc/passwd'"),
            (lambda t, m: m.update(shapes="[" * 20000), "do not fit (RecursionError"),
            (lambda t, m: m.update(exchanges='[["m.norm", 0.5, ["m.a", "m.b"]]]'), "has an exchange"),
            (
                lambda t, m: t.pop("index/m.b") is m.update(exchanges='[["m.norm", 1.0, []]]'),
                "has an exchange",
            ),
            (lambda t, m: m.update(exchanges='[["m/../x", 1.0, ["m.a"]]]'), "names a tensor 'm/../x'"),
            (lambda t, m: m.update(exchanges='[["m.norm", 1.0, ["m.a", "m.a", "m.b"]]]'), "exchange twice"),
            (lambda t, m: m.update(quantized='["m.a.weight", "m.z.weight"]'), "shape for m.z.weight"),
        ],
    )
    def test_damaged(self, good: Path, change, said: str) -> None:
        assert said in refused(profile_file.load, rewritten(good, change))

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"", "is empty"),
            (b"\x80\x04K\x01.", "a pickle is never opened"),
            (b"PK\x03\x04rest", "a pickle is never opened"),
            (struct.pack("<Q", 1 << 62) + b"{}", "cannot be read as safetensors"),
            (struct.pack("<Q", 4) + b"nope", "cannot be read as safetensors"),
            (struct.pack("<Q", 2) + b"{}", "not a profile"),
        ],
    )
    def test_other_bytes(self, data: bytes, said: str, tmp_path: Path) -> None:
        path = tmp_path / "p"
        path.write_bytes(data)
        assert said in refused(profile_file.load, path)

    def test_what_is_no_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        assert "not a regular file" in refused(profile_file.load, tmp_path / "fifo")
        assert "not a regular file" in refused(profile_file.load, tmp_path)
        assert "cannot be read" in refused(profile_file.load, tmp_path / "missing")
        assert "cannot be read" in refused(profile_file.load, tmp_path / "nul\0byte")

    @given(at=st.integers(0, 2000), value=st.binary(min_size=1, max_size=8))
    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_damage_is_refused_or_harmless(self, good: Path, at: int, value: bytes) -> None:
        data = bytearray(good.read_bytes())
        at %= len(data)
        data[at : at + len(value)] = value[: len(data) - at]
        path = good.with_name("damaged")
        path.write_bytes(data)
        try:
            profile = profile_file.load(path)
        except PatchError:
            return
        profile_file.check(profile, path)


class TestCheckpoint:
    @pytest.mark.parametrize(
        "file", ["../other/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\0b", 5, "~x", ""]
    )
    def test_an_index_that_leads_out(self, file, twins) -> None:
        _, other = twins
        profile_lab.index_with(other, {"model.norm.weight": file})
        assert "not a plain name beside it" in refused(Checkpoint, str(other))

    @pytest.mark.parametrize("name", ["../x", "a/b", "", "a b", "a\n", "x" * 400, "é"])
    def test_names_that_are_none(self, name: str, twins) -> None:
        _, other = twins
        profile_lab.index_with(other, {name: "model-1.safetensors"})
        assert "names a tensor" in refused(Checkpoint, str(other))

    def test_an_index_that_promises_too_much(self, twins) -> None:
        model, _ = twins
        index = model / "model.safetensors.index.json"
        held = json.loads(index.read_text())
        held["weight_map"]["more.weight"] = next(iter(held["weight_map"].values()))
        index.write_text(json.dumps(held))
        assert "lacks more.weight, which the index says it holds" in refused(Checkpoint, str(model))
        held["weight_map"]["more.weight"] = "absent.safetensors"
        index.write_text(json.dumps(held))
        assert "absent.safetensors: cannot be read" in refused(Checkpoint, str(model))

    @pytest.mark.parametrize("data", [b"\xff\xfe{}", b"[]", b"{" * 50000, b"", b'{"weight_map": 5}'])
    def test_an_index_that_is_none(self, data: bytes, twins) -> None:
        model, _ = twins
        (model / "model.safetensors.index.json").write_bytes(data)
        refused(Checkpoint, str(model))

    def test_a_huge_config(self, twins) -> None:
        model, _ = twins
        profile_lab.sparse(model / "config.json", GIB)
        assert "more than the 64 MiB" in refused(Checkpoint, str(model))

    def test_pickles_are_not_opened(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with (tmp_path / "pytorch_model.bin").open("wb") as file:
            pickle.dump(Bomb(tmp_path / "mark"), file)
        assert "only pytorch_model.bin, a pickle: not opened" in refused(Checkpoint, str(tmp_path))
        (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
        assert "a pickle is never opened" in refused(Checkpoint, str(tmp_path))
        assert not (tmp_path / "mark").exists()

    def test_nothing_is_downloaded(self) -> None:
        assert "nothing is downloaded" in refused(Checkpoint, "some-org/some-model-that-is-not-here")
