"""A profile smooths the weights that a trainer sends to an int8 engine."""

from pathlib import Path

import profile_lab
import pytest
import vllm_updates as updates
from vllm_lab import engines, environment, models, oracle, quantized, scenario
from vllm_precisions import A, B, check, int8, refusal, there_and_back

pytestmark = pytest.mark.vllm

_FULL = pytest.mark.full


def smooth_profile(model: str) -> Path:
    """A profile that moves scale from norms into what they feed, and from up into down."""
    import torch

    from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint
    from flashpatch.patches.fp8.calibration.profile_file import Profile, save
    from flashpatch.patches.fp8.calibration.structure import Exchange

    path = environment.store() / f"{Path(model).name}.profile.safetensors"
    if path.exists():
        return path
    shapes = {name: tuple(tensor.shape) for name, tensor in models.weights(model)}
    noise, exchanges, smooth = torch.Generator().manual_seed(7), [], {}
    for layer in (0, 1):
        at = f"model.layers.{layer}"
        for producer, offset, consumers in (
            ("input_layernorm", 0.0, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", 0.0, ("mlp.gate_proj", "mlp.up_proj")),
            ("mlp.up_proj", None, ("mlp.down_proj",)),
        ):
            exchanges.append(Exchange(f"{at}.{producer}", offset, tuple(f"{at}.{c}" for c in consumers)))
            width = shapes[f"{at}.{producer}.weight"][0]
            smooth[f"{at}.{producer}"] = torch.rand(width, generator=noise) + 0.5
    rounded = frozenset(
        name for name in shapes if name.endswith("proj.weight") and "0.self_attn.o_proj" not in name
    )
    with Checkpoint(model) as checkpoint:
        fingerprint = checkpoint.fingerprint()
    save(Profile("int8", "channel", fingerprint, shapes, tuple(exchanges), smooth, rounded), path)
    return path


def smoothed(model: str) -> str:
    """The checkpoint that `smooth_profile` makes of a model: its scales moved, its linear layers in int8 but one."""
    import json

    from flashpatch.patches.fp8.calibration.profile_file import load

    source = Path(model)
    profile = load(smooth_profile(str(source.with_name("qwen2-0"))))
    with models.making(source.with_name(f"{source.name}-smoothed")) as (target, work):
        if work is not None:
            tensors = profile_lab.rounded(models.weights(source), profile)
            models.write_changed(work, Path(quantized.quantize(source, "int8")), tensors)
            config = json.loads((work / "config.json").read_text())
            config["quantization_config"]["ignore"].append("model.layers.0.self_attn.o_proj")
            (work / "config.json").write_text(json.dumps(config))
    return str(target)


@pytest.mark.parametrize("template", [False, pytest.param(True, marks=_FULL)], ids=["bf16 model", "template"])
def test_a_profile_smooths_what_the_trainer_sends(runner: scenario.Runner, template: bool) -> None:
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    opens = smoothed(a) if template else a
    options = dict(profile=str(smooth_profile(a)))
    found = runner(there_and_back, "int8", opens, [b, a], updates.seed_of_the_day(), options=options)
    want = [oracle.answers(smoothed(source)) for source in (a, b)]
    assert engines.difference(want[0], int8(*A)).mean > 0, "smoothing changes nothing here"
    check(found, [want[0], want[1], want[0]])


def test_a_profile_of_another_model_opens_no_engine(runner: scenario.Runner) -> None:
    other = updates.checkpoint("llama", 0)
    error = runner(refusal, "int8", other, profile=str(smooth_profile(updates.checkpoint(*A))))
    assert "the profile is of another model" in error
