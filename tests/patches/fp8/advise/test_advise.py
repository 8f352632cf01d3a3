"""Advice: the products of a model, times that are real, verdicts that follow from them, and no guesses.

What a verdict says is tested on times made up for the purpose; that times are measured is tested by what was
run, never by how long it took.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import warm
from machine import limit

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")


import profile_lab
import torch

from flashpatch import PatchError
from flashpatch.patches.fp8.advise import measure, shapes, verdict
from flashpatch.patches.fp8.advise.measure import Measurement, Time
from flashpatch.patches.fp8.advise.shapes import Products


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return profile_lab.build(tmp_path_factory.mktemp("m") / "m", "qwen2")


def test_the_products_of_a_model(model: Path) -> None:
    found = shapes.of_model(model)
    assert found.layers == {(64, 128): 3, (64, 64): 3, (64, 192): 3, (96, 64): 3}, "qkv, o, gate and up, down"
    assert found.head == (64, profile_lab.VOCAB)
    tensors = profile_lab.tensors(model)
    assert found.weights == sum(t.numel() for t in tensors.values())
    assert found.touched == sum(t.numel() for name, t in tensors.items() if name.endswith("_proj.weight"))


def test_no_weights_are_needed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    assert shapes.of_model(tmp_path) == shapes.of_model(model)


PRODUCTS = Products({(64, 64): 10}, (64, 128), 100_000, 40_960)


def made_up(
    bf16: float, eight: float, kernel: float, head: float = 1e-9, bandwidth: float = 1e12
) -> Measurement:
    times = [
        Time(4, 64, 64, "bf16", bf16, bf16),
        Time(4, 64, 64, "int8", eight, kernel),
        Time(4, 64, 128, "bf16", head, head),
    ]
    return Measurement("made up", "nowhere", bandwidth, times)


@pytest.mark.parametrize(
    ("times", "word", "said"),
    [
        ((1e-3, 5e-4, 4e-4), "faster", ""),
        ((1e-3, 2e-3, 1.5e-3), "slower", "the 8-bit kernel alone takes 1.50 of the bf16 time"),
        ((1e-3, 2e-3, 5e-4), "open", "75% of the time; it pays only if the engine fuses them"),
        ((1e-3, 1e-3, 9.9e-4), "same", "the 8-bit kernel alone takes 0.99"),
        ((1e-3, 5e-4, 5e-4, 1.0), "same", "lm_head stays in bf16 and takes 99%"),
    ],
)
def test_words(times, word: str, said: str) -> None:
    found = verdict.judge(PRODUCTS, made_up(*times), 4, "int8")
    assert found.word == word and said in "; ".join(found.why)
    head = times[3] if len(times) > 3 else 1e-9
    assert found.bf16 == pytest.approx(10 * times[0] + head)
    assert found.speedup == pytest.approx((10 * times[0] + head) / (10 * times[1] + head))
    assert found.best == pytest.approx((10 * times[0] + head) / (10 * times[2] + head))


@pytest.mark.parametrize(
    ("bandwidth", "head", "said"),
    [
        (2 * 64 * 64 / 1e-3, 1e-9, "bound by memory"),
        (1e12, 1.0, "bound by arithmetic"),
        (1e12, 1e-6, "cost mostly their launch"),
    ],
)
def test_what_bounds_it(bandwidth: float, head: float, said: str) -> None:
    found = verdict.judge(PRODUCTS, made_up(1e-3, 5e-4, 4e-4, head, bandwidth), 4, "int8")
    assert said in found.why[0]


@pytest.mark.parametrize(("batch", "form"), [(5, "int8"), (4, "fp8")])
def test_what_was_not_measured_is_not_predicted(batch: int, form: str) -> None:
    measured = made_up(1e-3, 5e-4, 4e-4)
    measured.missing["fp8"] = "no such kernel"
    with pytest.raises(
        PatchError, match=r"was not measured on made up" + (r" \(no such" if form == "fp8" else "")
    ):
        verdict.judge(PRODUCTS, measured, batch, form)


def test_devices_that_are_not_here() -> None:
    assert measure.this_device("cpu") == torch.device("cpu")
    for name in ("H100", "cuda:99", "tpu", "mps"):
        with pytest.raises(PatchError, match="nothing was measured on it"):
            measure.this_device(name)


class TestMeasuring:
    def test_every_kernel_is_run_and_each_form_does_its_own_work(self, monkeypatch) -> None:
        called: list[str] = []
        for name in ("mm", "_int_mm", "_scaled_mm"):
            real = getattr(torch, name)
            monkeypatch.setattr(
                torch, name, lambda *a, name=name, real=real, **k: (called.append(name), real(*a, **k))[1]
            )
        monkeypatch.setattr(measure, "_SECONDS", 0.0)
        wanted = [(m, 64, 32, form) for m in (1, 24) for form in measure.FORMS]
        found = measure.measure(wanted, torch.device("cpu"))
        have = [form for form in measure.FORMS if form not in found.missing]
        assert {"bf16", "int8"} <= set(have)
        assert [(t.m, t.form) for t in found.times] == [(m, form) for m in (1, 24) for form in have]
        assert all(0 < t.kernel <= t.seconds for t in found.times) and found.bandwidth > 0
        rounds = measure._ROUNDS[0] + 1
        assert called.count("mm") >= 2 * rounds and called.count("_int_mm") >= 4 * rounds

    def test_the_timed_products_are_right(self) -> None:
        torch.manual_seed(0)
        for form in ("int8", "fp8"):
            try:
                whole, _ = measure._runs(24, 64, 32, form, torch.device("cpu"))
                out = whole(0)
            except (RuntimeError, NotImplementedError):
                continue
            plain, _ = measure._runs(24, 64, 32, "bf16", torch.device("cpu"))
            assert out.dtype == torch.bfloat16
            assert float((out - plain(0)).float().norm() / plain(0).float().norm()) < (
                0.02 if form == "int8" else 0.06
            )

    def test_a_form_without_a_kernel_is_said_to_have_none(self, monkeypatch) -> None:
        def none(*args, **kw):
            raise NotImplementedError("not on this device")

        monkeypatch.setattr(torch, "_scaled_mm", none)
        found = measure.measure([(2, 16, 16, form) for form in measure.FORMS], torch.device("cpu"))
        assert found.missing == {"fp8": "not on this device"}
        assert {t.form for t in found.times} == {"bf16", "int8"}


class TestKept:
    def test_round_trip(self, tmp_path: Path) -> None:
        kept = made_up(1e-3, 5e-4, 4e-4)
        measure.save(kept, tmp_path / "t.json")
        assert measure.load(tmp_path / "t.json") == kept

    @pytest.mark.parametrize(
        "change",
        [
            lambda d: d.update(format="x"),
            lambda d: d.update(bandwidth=float("nan")),
            lambda d: d.update(bandwidth=-1),
            lambda d: d.update(more=1),
            lambda d: d.update(times=5),
            lambda d: d["times"].append({"m": 1}),
            lambda d: d["times"][0].update(seconds=0),
            lambda d: d["times"][0].update(seconds="1"),
            lambda d: d["times"][0].update(form="int4"),
            lambda d: d.update(device=["x"]),
            lambda d: d.update(missing=[1]),
        ],
    )
    def test_damaged(self, change, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        measure.save(made_up(1e-3, 5e-4, 4e-4), path)
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(PatchError, match="is no measurement"):
            measure.load(path)

    def test_a_gigabyte(self, tmp_path: Path) -> None:
        with pytest.raises(PatchError, match="1024 MiB, more than the 16 MiB"):
            measure.load(profile_lab.sparse(tmp_path / "t.json", 1 << 30))


def run(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from flashpatch.cli import main; sys.exit(main())"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    return warm.run(warm.MODELS, ["-c", code, "advise", *args], env=environ, cwd=cwd, timeout=limit(300))


class TestCommand:
    @pytest.mark.slow
    def test_it_measures_keeps_and_reads_again(self, model: Path, tmp_path: Path) -> None:
        first = run(
            "--model", model, "--batch", "1,20", "--form", "int8", "--save", "t.json", "--json", cwd=tmp_path
        )
        assert first.returncode == 0, first.stderr
        data = json.loads(first.stdout)
        assert data["device"] == measure.name_of(torch.device("cpu")) or torch.cuda.is_available()
        assert [(v["form"], v["batch"]) for v in data["verdicts"]] == [("int8", 1), ("int8", 20)]
        assert all(v["word"] in ("faster", "open", "same", "slower") and v["why"] for v in data["verdicts"])
        again = run(
            "--model",
            model,
            "--batch",
            "1,20",
            "--form",
            "int8",
            "--measured",
            "t.json",
            "--json",
            cwd=tmp_path,
        )
        assert json.loads(again.stdout)["verdicts"] == data["verdicts"]
        other = run("--model", model, "--batch", "2", "--form", "int8", "--measured", "t.json", cwd=tmp_path)
        assert other.returncode == 1 and "was not measured on" in other.stderr

    def test_a_device_that_is_not_here(self, model: Path, tmp_path: Path) -> None:
        done = run("--model", model, "--device", "H100", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert "no device 'H100'" in done.stderr and "Traceback" not in done.stderr

    def test_wrong_usage(self, model: Path, tmp_path: Path) -> None:
        assert run("--model", model, "--batch", "0", cwd=tmp_path).returncode == 2
        assert run("--model", model, "--batch", "1,,2", cwd=tmp_path).returncode == 2
        assert run(cwd=tmp_path).returncode == 2
