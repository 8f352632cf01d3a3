"""What a drafter has from the policy is the policy's: a drafter's session cannot change it. D1."""

from pathlib import Path

import eagle_engines as eagles
import pytest
import sglang_lab as lab
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.sglang(least="0.5.21")  # before, SGLang speculates with kernels that no CPU runs

ASK = ["tokens", dict(count=24)]
EMBEDDING = "embed_tokens.weight"


def test_a_drafters_session_cannot_change_the_policy(models: Path, tmp_path: Path) -> None:
    target, other = (eagles.target(models, 0.0, seed) for seed in (0, 1))
    drafter = eagles.drafter(models, target, "right", exact=True)
    sent = []
    for name, policy in (("other", other), ("own", target)):
        (tmp_path / name).mkdir()
        tensors = load_file(Path(drafter) / "model.safetensors")
        tensors |= {EMBEDDING: load_file(Path(policy) / "model.safetensors")[f"model.{EMBEDDING}"]}
        save_file(tensors, tmp_path / name / "model.safetensors")
        sent.append(["update", dict(source=str(tmp_path / name), selector="draft")])
    job = dict(model=target, speculative_draft_model_path=drafter, flashpatch="bf16", **eagles.SPECULATIVE)
    seen = lab.run(tmp_path, steps=[ASK, sent[0], ASK, sent[1], ASK], **job)
    assert seen.done, str(seen)
    before, refused, after, taken, last = seen.steps
    assert before[0]["accept"] > 2
    assert not refused[-1][0] and f"{EMBEDDING} came with other values than the policy has" in refused[-1][1]
    assert [one["ids"] for one in after] == [one["ids"] for one in before]
    assert all(done for done, _ in taken) and last == before
