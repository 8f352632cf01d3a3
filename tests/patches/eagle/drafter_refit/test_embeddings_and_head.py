"""What a drafter shares with its target is gathered in small blocks, and comes to the host of one rank alone."""

import types

import pytest
import torch
from safetensors.torch import load_file

from flashpatch.patches.eagle.drafter_refit import embeddings_and_head

RANKS, ROWS, WIDTH, VOCABULARY = 2, 7, 4, 12  # two rows are padding


def model(rank: int) -> types.SimpleNamespace:
    def part(seed: int) -> types.SimpleNamespace:
        whole = torch.randn(RANKS * ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        rows = whole.bfloat16().view(RANKS, ROWS, WIDTH)[rank]
        return types.SimpleNamespace(weight=torch.nn.Parameter(rows), org_vocab_size=VOCABULARY)

    return types.SimpleNamespace(model=types.SimpleNamespace(embed_tokens=part(0)), lm_head=part(1))


@pytest.mark.parametrize("rank", range(RANKS))
def test_ranks_gather_a_few_rows_at_a_time(tmp_path, monkeypatch, rank):
    monkeypatch.setattr(embeddings_and_head, "_BLOCK", 3 * WIDTH * 2)
    given = [one.weight for r in range(RANKS) for one in (model(r).model.embed_tokens, model(r).lm_head)]
    embeddings, heads = given[::2], given[1::2]
    asked: list[tuple[int, ...]] = []

    def gather(rows: torch.Tensor) -> torch.Tensor:
        call, asked[:] = len(asked), [*asked, tuple(rows.shape)]
        first, all_ranks = 3 * (call % 3), embeddings if call < 3 else heads
        return torch.cat([weight.data[first : first + len(rows)] for weight in all_ranks])

    first = rank == 0
    saved = embeddings_and_head.save_embeddings_and_head(model(rank), tmp_path / "at", gather, first, "test")
    assert asked == [(3, WIDTH), (3, WIDTH), (1, WIDTH)] * 2 and saved == (2 if first else 0)
    assert (tmp_path / "at").exists() == first
    if first:
        found = load_file(tmp_path / "at" / "model.safetensors")
        assert torch.equal(found["model.embed_tokens.weight"], torch.cat(embeddings)[:VOCABULARY])
        assert torch.equal(found["lm_head.weight"], torch.cat(heads)[:VOCABULARY])
