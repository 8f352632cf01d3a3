"""A transformer of some 20,000 weights as policy over the expressions, with the package's partition function.

The prompt is two tokens (a digit and ``=``), an answer three: digit, sign, digit. Logits outside that grammar are
masked, so that the 300 answers to a prompt are all there are and the target stays exact.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn
from worlds import ALL, TARGETS, World, expressions

from flashpatch.patches.flowrl.partition_function import PartitionFunction, Prompts

VOCABULARY = "0123456789+-*="
WORDS, DIGITS = len(VOCABULARY), 10
WIDTH, LAYERS, PROMPT, ANSWER = 32, 2, 2, 3


class Transformer(nn.Module):
    """Causal; the forward pass returns last hidden states and log-probabilities within the grammar."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(PROMPT + ANSWER, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)
        digit = torch.tensor([character.isdigit() for character in VOCABULARY])
        sign = torch.tensor([character in "+-*" for character in VOCABULARY])
        allowed = torch.stack([digit, sign, digit])
        self.register_buffer("forbidden", torch.where(allowed, 0.0, -1e9))
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(PROMPT + ANSWER - 1))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map ``(rows, 4)`` ids, a prompt and an answer without its last token, to hidden states ``(rows, 4,
        WIDTH)`` and log-probabilities of the answer's tokens ``(rows, 3, vocabulary)``."""
        hidden = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        hidden = self.layers(hidden, mask=self.causal, is_causal=True)
        return hidden, (self.head(hidden[:, PROMPT - 1 :]) + self.forbidden).log_softmax(-1)


class Learner:
    """A copy of a transformer and a fresh partition function, as a policy of one seed; see `policies.Table`."""

    def __init__(self, model: Transformer, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.partition = PartitionFunction(WIDTH, 3, 0.0)
        self.model = copy.deepcopy(model)
        self.ids = torch.tensor([[encoded(f"{target}={text}") for text in ALL] for target in TARGETS])
        self._prompts: torch.Tensor | None = None

    def parameters(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return list(self.model.parameters()), list(self.partition.parameters())

    def answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `policies.Table.answers`. Answers that differ in the last digit alone are neighbours in ``ALL``, so one
        forward pass per beginning gives all ten."""
        log_prob = self.model(self.ids[:, ::DIGITS].flatten(0, 1)[:, :-1])[1].view(
            len(self.ids), -1, 1, ANSWER, WORDS
        )
        log_prob = log_prob.expand(-1, -1, DIGITS, -1, -1).flatten(1, 2)
        taken = log_prob.gather(-1, self.ids[:, :, PROMPT:, None])[..., 0]
        return taken[None], _entropy(log_prob)[None]

    def chosen(self, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `policies.Table.chosen`."""
        prompts = torch.arange(len(self.ids))[:, None]
        rows = self.ids[prompts, which[0]].flatten(0, 1)
        hidden, log_prob = self.model(rows[:, :-1])
        self._prompts = Prompts(torch.full((len(rows),), PROMPT), None).mean(hidden)
        taken = log_prob.gather(-1, rows[:, PROMPT:, None])[..., 0]
        return tuple(part.view(*which.shape, ANSWER) for part in (taken, _entropy(log_prob)))

    def log_z(self) -> torch.Tensor:
        """Of the prompts of the last `chosen`, ``(1, P)``."""
        return self.partition(self._prompts).view(1, len(self.ids), -1)[..., 0]


def _entropy(log_prob: torch.Tensor) -> torch.Tensor:
    return -(log_prob.exp() * log_prob).sum(-1)


def encoded(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def taught(lessons: int = 400) -> Transformer:
    """Teach a model the table's reference."""
    table = expressions(tokens=ANSWER)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        learner = Learner(Transformer(), 0)
    wanted = table.reference.sum(-1).exp().float()
    optimizer = torch.optim.Adam(learner.model.parameters(), lr=5e-3)
    for lesson in range(lessons):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - lesson / lessons)
        optimizer.zero_grad()
        (-(wanted * learner.answers()[0][0].sum(-1)).sum(-1).mean()).backward()
        optimizer.step()
    return learner.model


def world_of(model: Transformer) -> World:
    """Return the expressions with this model as the reference."""
    with torch.no_grad():
        reference = Learner(model, 0).answers()[0][0].double()
    return replace(expressions(tokens=ANSWER), name="transformer", reference=reference)
