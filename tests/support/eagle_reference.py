"""Compute Hugging Face's answers on the same checkpoints, in float32."""

from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import torch
from chi_square import chance


@cache
def model(path: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def states(path: Path, tokens: list[int], layers: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n, H] after the final norm, and logprobs [n, V]; with ``layers``, their outputs side by side instead."""
    found = model(path)(torch.tensor([tokens]), output_hidden_states=True)
    if layers:
        side = torch.cat([found.hidden_states[layer][0] for layer in layers], dim=-1)
        return side, found.logits[0].log_softmax(-1)
    return found.hidden_states[-1][0], found.logits[0].log_softmax(-1)


def logprobs_of(path: Path, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probability of each of these tokens after a prompt."""
    _, logprobs = states(path, [*prompt, *tokens])
    after = (logprobs[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return after.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def check_samples(path: Path, samples: list, answers: dict, shared: int) -> None:
    """Compare captured tokens with answers by prompt, and states with a forward's; a prefix that was cached is masked."""
    masked = 0
    assert len(samples) == len(answers)
    for sample in samples:
        count, known, tokens = int((~sample.response).sum()), sample.known, sample.input_ids.tolist()
        assert tokens[count:] == answers[tuple(tokens[:count])]
        assert known[count:-1].all() and not known[-1]
        wanted = states(path, tokens)[0]
        torch.testing.assert_close(sample.hidden[known], wanted[known], atol=2e-4, rtol=1e-3)
        assert not sample.hidden[~known].any()
        masked += int((~known[:count]).sum())
    assert 0 < masked <= shared, "the cached prefix was not masked, or more than it was"


@torch.no_grad()
def probabilities(path: Path, prompts: list[list[int]]) -> torch.Tensor:
    """Return float64 [prompts, V], probabilities of the next token, for prompts of one length."""
    return model(path)(torch.tensor(prompts)).logits[:, -1].double().softmax(-1)


def check_distribution(path: Path, prompt: list[int], answers: list[list[int]], vocabulary: int) -> None:
    """Compare three sampled positions, chi-square, each with its exact marginal; the engine's seeds are fixed."""
    tokens = range(vocabulary)
    first = probabilities(path, [prompt])[0]
    second_given = probabilities(path, [[*prompt, a] for a in tokens])
    joint = (first[:, None] * second_given).flatten()
    third_given = probabilities(path, [[*prompt, a, b] for a, b in product(tokens, tokens)])
    for position, wanted in enumerate((first, first @ second_given, joint @ third_given)):
        counts = Counter(answer[position] for answer in answers)
        found = torch.tensor([counts[token] for token in tokens], dtype=torch.float64)
        assert chance(found, wanted * len(answers)) > 1e-3, position


def filtered(row: list[float], top_k: int, top_p: float) -> list[float]:
    """By definition: the ``top_k`` likeliest scaled to sum 1, of these the fewest that reach ``top_p``, scaled."""
    ranked = sorted(range(len(row)), key=lambda token: -row[token])[:top_k]
    whole, kept = sum(row[token] for token in ranked), []
    for token in ranked:
        if sum(row[one] for one in kept) / whole >= top_p:
            break
        kept.append(token)
    mass = sum(row[token] for token in kept)
    return [row[token] / mass if token in kept else 0.0 for token in range(len(row))]
