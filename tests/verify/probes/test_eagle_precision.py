"""What ``flashpatch-verify eagle`` takes for equal on a GPU, whose attention rounds the factors of its products."""

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from flashpatch.verify.probes.eagle import job, probe, tiny

TF32, BF16 = 10, 7
"""Bits of a factor's fraction that are kept."""
TOKENS = 24  # per answer, fewer than the probe's


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    dropped = 23 - bits
    whole = values.contiguous().view(torch.int32) + (1 << (dropped - 1))
    return (whole & ~((1 << dropped) - 1)).view(torch.float32)


def attention(bits: int):
    """Return torch's attention with rounded factors, as Triton's kernels multiply float32."""

    def attend(q, k, v, scale=None, **_):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = rounded(q, bits) @ rounded(k, bits).transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return rounded(weights, bits) @ rounded(v, bits) / weights.sum(-1, keepdim=True)

    return attend


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("probe") / "target", seed=2, adds=probe._ADDS)


@pytest.fixture(scope="module", params=[TF32, BF16], ids=["tf32", "bf16"])
def engine(request, target) -> list[tuple[list[int], torch.Tensor]]:
    """Return answers of an engine that attends so, and its states: the reference with another attention."""
    answers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention(request.param))
        for prompt in job.prompts():
            tokens = list(prompt)
            while len(tokens) < len(prompt) + TOKENS:
                tokens.append(int(probe._forward(target, tokens)[1][-1]))
            answers.append(tokens)
        states = [probe._forward(target, tokens)[0] for tokens in answers]
    return list(zip(answers, states, strict=True))


def judged(target: Path, engine, monkeypatch, on_gpu: bool, shift: int = 0) -> tuple[bool, bool]:
    """Return whether the probe takes the greedy tokens, and the states."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    tokens = [one[len(prompt) :] for prompt, (one, _) in zip(job.prompts(), engine, strict=True)]
    samples = [
        SimpleNamespace(
            input_ids=torch.tensor(one),
            hidden=states.roll(shift, 0),
            known=torch.arange(len(one)) < len(one) - 1,
        )
        for one, states in engine
    ]
    seen = {"tokens": {name: [tokens] * job.TURNS for name in job.DRAFTERS}}
    counts = {"lost": 0, "mismatched": 0}
    states = probe._aligned(target, samples * 5, seen, counts)  # it wants some hundred
    return probe._greedy(target, seen).ok, states.ok


def test_a_gpus_rounding_is_no_fault_and_a_neighbours_state_is(target, engine, monkeypatch):
    assert judged(target, engine, monkeypatch, on_gpu=True) == (True, True)
    assert judged(target, engine, monkeypatch, on_gpu=True, shift=1) == (True, False)


def test_on_a_cpu_that_rounding_is_a_fault(target, engine, monkeypatch):
    assert judged(target, engine, monkeypatch, on_gpu=False) == (True, False)
