"""What ``flashpatch-verify eagle`` takes for equal on a GPU, whose attention rounds the factors of its products."""

from types import SimpleNamespace

import pytest
import torch

from flashpatch.verify.probes.eagle import job, probe, tiny

TF32 = 0.01
"""More than float32 kernels differ by, less than what is taken for a GPU's rounding."""


@pytest.mark.parametrize(
    ("on_gpu", "noise", "shift", "good"),
    [(True, TF32, 0, True), (True, TF32, 1, False), (False, TF32, 0, False), (False, 0.0, 0, True)],
)
def test_a_gpus_rounding_is_no_fault_and_a_neighbours_state_is(
    tmp_path, monkeypatch, on_gpu, noise, shift, good
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    target = tiny.target(tmp_path / "target", seed=2, adds=probe._ADDS)
    answer, samples = list(range(3, 27)), []
    for prompt in job.prompts():
        states, _ = probe._forward(target, prompt + answer)
        states = states + noise * torch.empty_like(states).uniform_(-1, 1)
        known = torch.arange(len(states)) < len(states) - 1
        tokens = torch.tensor(prompt + answer)
        samples.append(SimpleNamespace(input_ids=tokens, hidden=states.roll(shift, 0), known=known))
    seen = {"answers": [dict(prompt=prompt, tokens=answer) for prompt in job.prompts()]}
    seen["captured"] = {"lost": 0, "mismatched": 0}
    assert probe._aligned(target, samples * 5, seen).ok is good  # it wants some hundred
