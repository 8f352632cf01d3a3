"""A profile from a pair: the scales it finds, what it does with them, and what it refuses."""

import numpy
import profile_lab
import pytest
import torch

from flashpatch import PatchError
from flashpatch.patches.fp8.calibration import profile_file
from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint
from flashpatch.patches.fp8.calibration.from_checkpoint import compare

UP = "model.layers.0.mlp.up_proj"


def compared(model, other):
    with Checkpoint(str(model)) as a, Checkpoint(str(other)) as b:
        return compare(a, b)


def refused(model, other) -> str:
    with pytest.raises(PatchError) as caught:
        compared(model, other)
    return str(caught.value)


@pytest.mark.parametrize("family", profile_lab.FAMILIES)
def test_every_scale_is_found_and_turns_one_into_the_other(family: str, pairs, tmp_path) -> None:
    model, other, scales = pairs(family)
    profile, rows = compared(model, other)
    assert set(profile.smooth) == set(scales)
    for producer, scale in scales.items():
        off = numpy.abs(profile.smooth[producer].double().numpy() / scale - 1)
        assert off.mean() < 0.003 and off.max() < 0.015, producer  # 64 rounded rows a channel say no more
    profile_file.save(profile, tmp_path / "p.safetensors")
    loaded = profile_file.load(tmp_path / "p.safetensors")
    wanted = profile_lab.tensors(other)
    made = profile_lab.rounded(profile_lab.tensors(model).items(), loaded)
    assert set(made) == {name for name in wanted if name != "lm_head.weight" or "lm_head.weight" in made}
    for name, tensor in made.items():
        if tensor.dtype == torch.int8:  # scales differ by 127.5 / 127, so values are compared, not codes
            ours = tensor.float() * made[f"{name}_scale"]
            theirs = wanted[name].float() * wanted[f"{name}_scale"].float()
            assert (ours - theirs).norm() < 0.02 * theirs.norm(), name
        elif not name.endswith("_scale"):
            assert (tensor - wanted[name]).float().norm() <= 0.01 * wanted[name].float().norm(), name
    assert len(rows) == 21
    assert all(row.error <= row.allowed and row.equal > 0.8 for row in rows)


@pytest.mark.parametrize(("form", "granularity"), [("fp8", "channel"), ("fp8", "tensor"), ("int8", "tensor")])
def test_other_formats(form: str, granularity: str, pairs) -> None:
    profile, rows = compared(*pairs("llama", form=form, granularity=granularity)[:2])
    assert (profile.form, profile.granularity, len(profile.smooth)) == (form, granularity, 12)
    assert len(rows) == len(profile.quantized) == 21


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_without_smoothing_nothing_is_exchanged(form: str, pairs) -> None:
    profile, rows = compared(*pairs("qwen3", form=form, norms=False, linears=False)[:2])
    assert profile.exchanges == () and dict(profile.smooth) == {}
    assert min(row.equal for row in rows) > 0.999


def test_coarse_rounding_is_told_from_another_model(pairs, tmp_path) -> None:
    """An error twice that of rounding to nearest, as GPTQ makes, is accepted; other weights are not."""
    import shutil

    model, other, _ = pairs("llama")
    noisy = shutil.copytree(other, tmp_path / "noisy")

    def push(held):
        generator = torch.Generator().manual_seed(0)
        for name, tensor in held.items():
            if tensor.dtype == torch.int8:
                by = torch.randint(-1, 2, tensor.shape, generator=generator) * (
                    torch.rand(tensor.shape) < 0.3
                )
                held[name] = (tensor.int() + by).clamp(-128, 127).to(torch.int8)

    profile_lab.edit(noisy, push)
    _, rows = compared(model, noisy)
    assert max(row.equal for row in rows) < 0.9


class TestRefusals:
    def test_another_model_of_the_same_shapes(self, twins, tmp_path) -> None:
        _, other = twins
        stranger = profile_lab.build(tmp_path / "stranger", "qwen2", seed=5)
        message = refused(stranger, other)
        assert "is not" in message and "and 31 more" in message

    def test_a_layer_that_was_trained_further_is_named(self, twins) -> None:
        model, other = twins
        name = "model.layers.1.mlp.gate_proj.weight"

        def change(held):
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(held[name].shape, generator=generator) * held[name].float().std()
            held[name] = (held[name].float() + 0.1 * noise).round().clamp(-128, 127).to(torch.int8)

        profile_lab.edit(other, change)
        message = refused(model, other)
        assert f"{name} (differs by" in message and "layers.0" not in message

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda held: held.pop(f"{UP}.weight"), "up_proj.weight (missing)"),
            (lambda held: held.pop(f"{UP}.weight_scale"), f"lacks {UP}"),
            (
                lambda held: held.update({"extra.weight": torch.ones(2)}),
                "extra.weight (only in the quantized",
            ),
            (
                lambda held: held.update({"model.norm.weight": torch.ones(3)}),
                "model.norm.weight ([3], not [64])",
            ),
            (lambda held: held[f"{UP}.weight_scale"].fill_(float("nan")), "not positive and"),
            (lambda held: held[f"{UP}.weight_scale"].zero_(), "not positive and finite"),
            (
                lambda held: held.update({f"{UP}.weight_scale": torch.ones(96, 4)}),
                "neither per tensor nor per",
            ),
            (lambda held: held.update({f"{UP}.weight_zero_point": torch.ones(96, 1)}), "asymmetric"),
        ],
        ids=["missing", "no-scale", "extra", "shape", "nan", "zero", "groups", "asymmetric"],
    )
    def test_a_damaged_twin(self, twins, change, said: str) -> None:
        model, other = twins
        profile_lab.edit(other, change)
        assert said in refused(model, other)

    def test_the_two_exchanged_or_the_same(self, twins) -> None:
        model, other = twins
        assert "quantized itself" in refused(other, other)
        assert "holds no 8-bit weight" in refused(model, model)


def test_a_type_outside_the_table_is_compared_only_if_it_was_not_smoothed(pairs, bf16, tmp_path) -> None:
    model = bf16("olmo2")
    for name, smoothed in (("plain", False), ("smoothed", True)):
        profile_lab.quantize(model, tmp_path / name, "olmo2", norms=False, linears=smoothed)
    profile, rows = compared(model, tmp_path / "plain")
    assert (profile.exchanges, len(rows)) == ((), 21)
    message = refused(model, tmp_path / "smoothed")
    assert "A model of type 'olmo2' must be quantized without SmoothQuant" in message
