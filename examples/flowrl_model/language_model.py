"""Sample answers of a causal language model and compute their log-probabilities, each prompt's cache shared by its group.

Prompts are ``(P, L)`` token ids of one length, answers ``(P, G, T)`` where any token may follow the end.
Weights and log-probabilities are in float32; matrix products in bfloat16 by autocast where the processor has instructions
for it, in float32 elsewhere, where torch takes several times as long for bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from task import LONGEST, question

from flashpatch.patches.fp8.precision.product import has_bf16_products


class LanguageModel:
    """A checkpoint with its tokenizer."""

    def __init__(self, checkpoint: Path) -> None:
        self.words = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.end = self.words.convert_tokens_to_ids("<|im_end|>")

    def asked(self, targets: list[int]) -> torch.Tensor:
        """The prompts of some targets."""
        return torch.tensor(self.words([question(target) for target in targets]).input_ids)

    def written(self, answers: list[list[str]]) -> torch.Tensor:
        """The token ids of texts, each with its end and padding."""
        rows = [
            [(self.words(text).input_ids + [self.end] * LONGEST)[:LONGEST] for text in group]
            for group in answers
        ]
        return torch.tensor(rows)

    def read(self, answers: torch.Tensor) -> list[list[str]]:
        """The texts of answers; one without an end has a mark behind it, which no right answer has."""
        return [
            [
                self.words.decode(row[: row.index(self.end)])
                if self.end in row
                else f"{self.words.decode(row)}..."
                for row in group
            ]
            for group in answers.tolist()
        ]

    def mask(self, answers: torch.Tensor) -> torch.Tensor:
        """True for each answer's tokens up to its end."""
        ended = (answers == self.end).cumsum(-1)
        return (ended == 0) | ((ended == 1) & (answers == self.end))

    @torch.no_grad()
    def sample(self, prompts: torch.Tensor, size: int, draw: torch.Generator) -> torch.Tensor:
        """Sample ``size`` answers per prompt at temperature 1."""
        logits, cache, _ = self._prompts(prompts, size)
        found = []
        for place in range(LONGEST):
            chances = logits.softmax(-1)
            token = torch.multinomial(chances, 1, generator=draw)
            found.append(token)
            if place < LONGEST - 1:
                logits = self._logits(self._hidden(token, cache))[:, 0]
        return torch.cat(found, 1).view(len(prompts), size, LONGEST)

    def log_prob(self, prompts: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the answers' tokens, ``(P, G, T)``, and the prompts' mean last hidden states ``(P, width)``."""
        shape = answers.shape
        first, cache, means = self._prompts(prompts, shape[1])
        rows = answers.flatten(0, 1)
        later = self._logits(self._hidden(rows[:, :-1], cache))
        logits = torch.cat([first[:, None], later], 1)
        taken = logits.gather(-1, rows[..., None])[..., 0] - logits.logsumexp(-1)
        return taken.view(shape), means

    def _prompts(self, prompts, size):
        """Logits of the first answer's token and the cache, each repeated ``size`` times, and mean hidden states."""
        cache = transformers.DynamicCache()
        hidden = self._hidden(prompts, cache)
        cache.batch_repeat_interleave(size)
        return self._logits(hidden[:, -1]).repeat_interleave(size, 0), cache, hidden.float().mean(1)

    def _hidden(self, ids, cache):
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16_products()):
            return self.model.model(ids, past_key_values=cache, use_cache=True).last_hidden_state

    def _logits(self, hidden):
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16_products()):
            return self.model.lm_head(hidden).float()
