"""What answers of a sampler that is not the target's show, by plain formulas."""

import pytest

torch = pytest.importorskip("torch")

from flashpatch.verify import sampled

SIZE, LONG = 32, 12


def answered(shared: bool) -> sampled.Tally:
    """Judge answers to eight prompts, five in a batch, whose next token depends on the last one: each by a generator of its own, or
    the first token of all by one."""
    table = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 2
    tally, own = sampled.Tally(1e-3), torch.Generator().manual_seed(1)
    for prompt, asked in sampled.batches("vllm"):
        noise = torch.rand(SIZE, generator=own)
        for one in asked:
            tokens, scores = [], []
            for at in range(LONG):
                row = table[(tokens or prompt)[-1]]
                chances = sampled.distributions(row[None], prompt, [0], one, 0.0)[0].exp()
                if tokens:  # penalties count what came
                    rows = table[[prompt[-1], *tokens]]
                    chances = sampled.distributions(rows, prompt, [*tokens, 0], one, 0.0)[-1].exp()
                drawn = noise if shared and not at else torch.rand(SIZE, generator=own)
                tokens.append(int((chances / -drawn.double().log()).argmax()))
                scores.append(float(row.log_softmax(-1)[tokens[-1]]))
            tally.add(table[[prompt[-1], *tokens[:-1]]], prompt, one, tokens, scores, "raw")
    return tally


def test_requests_that_share_a_seed_are_told_from_those_that_do_not():
    good, bad = answered(shared=False), answered(shared=True)
    assert good.good and good.shared < 3, (good.shared, good.off, good.outside)
    assert bad.shared > sampled.SURE and not bad.good and bad.off < sampled.SURE and not bad.outside, (
        bad.shared
    )
