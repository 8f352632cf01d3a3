"""What answers of a sampler that is not the target's show, by plain formulas."""

import pytest

torch = pytest.importorskip("torch")

from flashpatch.verify import sampled


def answered(shared: bool) -> sampled.Tally:
    """Judge answers whose next token depends on the last one: each token is drawn by itself, or the first of a batch's by one draw."""
    table = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * 2
    tally, own = sampled.Tally(1e-3), torch.Generator().manual_seed(1)
    for prompt, asked in sampled.batches("vllm"):
        noise = torch.rand(32, generator=own)
        for one in asked:
            tokens = []
            for at in range(12):
                rows = table[[prompt[-1], *tokens]]
                chances = sampled.distributions(rows, prompt, [*tokens, 0], one, 0.0)[-1].exp()
                drawn = noise if shared and not at else torch.rand(32, generator=own)
                tokens.append(int((chances / -drawn.double().log()).argmax()))
            scores = rows.log_softmax(-1)[range(12), tokens].tolist()
            tally.add(rows, prompt, one, tokens, scores, "raw")
    return tally


def test_requests_that_share_a_seed_are_told_from_those_that_do_not():
    good, bad = answered(shared=False), answered(shared=True)
    assert good.good and good.shared < 3, (good.shared, good.off, good.outside)
    assert bad.shared > sampled.SURE > bad.off and not bad.good and not bad.outside, bad.shared
