"""What answers of a sampler that is not the target's show, by plain formulas."""

import pytest

torch = pytest.importorskip("torch")

from flashpatch.verify import sampled


def answered(wrong: str) -> sampled.Tally:
    """Judge answers whose next token depends on the last one, drawn without what is ``wrong``; "seeds": each first one by one draw."""
    table = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * 2
    tally, own = sampled.Tally(1e-3), torch.Generator().manual_seed(1)
    for prompt, asked in sampled.batches("vllm"):
        noise = torch.rand(32, generator=own)
        for one in asked:
            used, tokens = {name: value for name, value in one.items() if name != wrong}, []
            for at in range(12):
                rows = table[[prompt[-1], *tokens]]
                chances = sampled.distributions(rows, prompt, [*tokens, 0], used, 0.0)[-1].exp()
                drawn = noise if wrong == "seeds" and not at else torch.rand(32, generator=own)
                tokens.append(int((chances / -drawn.double().log()).argmax()))
            tally.add(rows, prompt, one, tokens, rows.log_softmax(-1)[range(12), tokens].tolist(), "raw")
    return tally


@pytest.mark.parametrize("wrong", ["", "seeds", "top_k", "top_p", "frequency_penalty", "repetition_penalty"])
def test_what_a_sampler_does_wrong_shows(wrong):
    tally = answered(wrong)
    found = "seeds" if tally.shared > sampled.SURE else wrong if not tally.good else ""
    assert found == wrong, (tally.outside, tally.off, tally.shared)
