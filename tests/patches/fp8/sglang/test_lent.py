"""What an MTP head has from the policy is the policy's: a session of the head's cannot change it, nor need it come. D1, D2."""

import json
from pathlib import Path

import eagle_engines as eagles
import pytest
import sglang_lab as lab
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.sglang(least="0.5.21")  # before, SGLang speculates with kernels that no CPU runs

ASK = ["tokens", dict(count=24)]
EMBEDDING = "model.embed_tokens.weight"
OWN = "model.mtp_layers.0."


def with_head(models: Path, to: Path, seed: int) -> dict[str, torch.Tensor]:
    """Write a MiMo whose layers count for nothing, and so those of its MTP head; return its tensors."""
    source = Path(eagles.target(models, 0.0, seed))
    tensors = load_file(source / "model.safetensors")
    layer = {
        name.replace("model.layers.0.", OWN): one.clone() for name, one in tensors.items() if ".0." in name
    }
    norm = tensors["model.norm.weight"]
    layer |= {f"{OWN}{name}_layernorm.weight": norm.clone() for name in ("token", "hidden", "final")}
    layer[f"{OWN}input_proj.weight"] = torch.eye(len(norm)).repeat(1, 2)
    to.mkdir()
    config = json.loads((source / "config.json").read_text())
    config |= dict(architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors | layer, to / "model.safetensors", metadata={"format": "pt"})
    return tensors | layer


def test_an_mtp_head_stays_or_comes_alone_and_cannot_change_the_policy(models: Path, tmp_path: Path) -> None:
    first, other = (with_head(models, tmp_path / str(seed), seed) for seed in (0, 1))
    head = {name: one for name, one in other.items() if name.startswith(OWN)}
    policy = {name: one for name, one in other.items() if name not in head}
    foreign, equal = (head | {EMBEDDING: of[EMBEDDING]} for of in (first, other))
    steps = []
    for name, sent, selector in (
        ("policy", policy, "all"),
        ("foreign", foreign, "draft"),
        ("head", head, "draft"),
        ("equal", equal, "draft"),
        ("first", first, "all"),
        ("again", policy, "target"),
    ):
        (tmp_path / name).mkdir()
        save_file(sent, tmp_path / name / "model.safetensors")
        steps += [["update", dict(source=str(tmp_path / name), selector=selector)], ASK]
    few = dict(eagles.SPECULATIVE, speculative_num_steps=1, speculative_num_draft_tokens=2)
    job = dict(model=str(tmp_path / "0"), speculative_draft_model_path=str(tmp_path / "0"), flashpatch="bf16")
    seen = lab.run(tmp_path, steps=[ASK, *steps], **job, **few)
    assert seen.done, str(seen)
    answers = [[one["ids"] for one in asked] for asked in seen.steps[::2]]
    done, refused = zip(*(update[-1] for update in seen.steps[1::2]), strict=True)
    assert done == (True, False, True, True, True, True), refused
    assert f"{EMBEDDING} came with other values than the policy has" in refused[1]
    assert answers[0] == answers[5] != answers[1]
    assert all(answers[at] == answers[1] for at in (2, 3, 4, 6))
