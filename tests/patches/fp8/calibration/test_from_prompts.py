"""Scales from calibration prompts: they are SmoothQuant's, they help, and change no function."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import profile_lab
import torch

from flashpatch import PatchError
from flashpatch.patches.fp8.calibration import from_prompts, profile_file
from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def outliers(tmp_path_factory):
    """A model some of whose normed channels are fifty times the others, as large models' are."""
    directory = profile_lab.build(tmp_path_factory.mktemp("m") / "m", "qwen2", shards=False)

    def change(held):
        for name, tensor in held.items():
            if "layernorm" in name:
                tensor[5] *= 50
                tensor[40] *= 50

    profile_lab.edit(directory, change)
    return directory


def calibrated(model, **how):
    with Checkpoint(str(model)) as checkpoint:
        return from_prompts.calibrate(checkpoint, from_prompts.random_tokens(profile_lab.VOCAB, 4, 32), **how)


def test_outliers_are_smoothed_and_errors_fall(outliers) -> None:
    profile, rows = calibrated(outliers)
    assert len(profile.exchanges) == 6 and len(profile.quantized) == 21 and len(rows) == 15
    for scale in profile.smooth.values():
        assert scale[[5, 40]].min() > 3 * scale.median()
    assert all(row.error < row.allowed for row in rows), "smoothing helps every layer here"
    assert sum(row.error for row in rows) < 0.5 * sum(row.allowed for row in rows)


def test_the_scales_are_those_of_the_paper(outliers) -> None:
    """Equation 4, for the first layer, from a forward of our own."""
    from transformers import AutoModelForCausalLM

    profile, _ = calibrated(outliers, alpha=0.7)
    model = AutoModelForCausalLM.from_pretrained(outliers, dtype="auto")
    seen = []
    layer = model.model.layers[0]
    layer.input_layernorm.register_forward_hook(
        lambda m, a, out: seen.append(out.abs().amax((0, 1)).double())
    )
    for ids in from_prompts.random_tokens(profile_lab.VOCAB, 4, 32):
        model(input_ids=torch.tensor([ids]))
    act = torch.stack(seen).amax(0)
    weight = torch.stack(
        [getattr(layer.self_attn, f"{x}_proj").weight.abs().amax(0).double() for x in "qkv"]
    ).amax(0)
    wanted = act**0.7 / weight**0.3
    assert torch.allclose(profile.smooth["model.layers.0.input_layernorm"].double(), wanted, rtol=1e-5)


def test_all_exchanges_with_shared_heads(outliers, tmp_path) -> None:
    profile, _ = calibrated(outliers, every_exchange=True)
    assert len(profile.exchanges) == 12
    profile_file.save(profile, tmp_path / "p")
    loaded = profile_file.load(tmp_path / "p")
    assert loaded.smooth["model.layers.0.self_attn.v_proj"].shape == (32,)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(outliers, dtype=torch.float32)
    ids = torch.arange(24).reshape(1, 24)
    before = model(input_ids=ids).logits
    model.load_state_dict({name: new.float() for name, new in loaded.apply(model.state_dict().items())})
    assert torch.allclose(model(input_ids=ids).logits, before, atol=2e-4 * float(before.abs().max()))


def test_it_is_the_same_every_time(outliers) -> None:
    first, second = (calibrated(outliers)[0].smooth for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_that_yields_nan_is_refused(outliers, tmp_path) -> None:
    import shutil

    broken = shutil.copytree(outliers, tmp_path / "b")
    profile_lab.edit(broken, lambda held: held["model.layers.1.mlp.up_proj.weight"].fill_(float("nan")))
    with pytest.raises(PatchError, match="not finite"):
        calibrated(broken)


def test_prompt_files(tmp_path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n\n  two \nthree\n", encoding="utf-8")
    assert from_prompts.read(path, 2) == ["one", "two"]
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(PatchError, match="not UTF-8"):
        from_prompts.read(path, 2)
    path.write_text("\n \n")
    with pytest.raises(PatchError, match="holds no prompt"):
        from_prompts.read(path, 2)
    profile_lab.sparse(path, 1 << 30)
    with pytest.raises(PatchError, match="more than the 64 MiB"):
        from_prompts.read(path, 2)


def test_without_a_tokenizer_it_says_what_to_do(outliers) -> None:
    with pytest.raises(PatchError, match="--random N"):
        from_prompts.tokens(outliers, ["x"], 8)
