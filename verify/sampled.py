"""What sampled answers are asked with, and how likely the target makes each of their tokens, by plain formulas."""

from __future__ import annotations

from collections.abc import Iterator

import torch

Asked = dict[str, float]
"""Sampling parameters of a request."""
GREEDY: Asked = {"temperature": 0.0}
NUCLEUS: Asked = {"temperature": 0.8, "top_p": 0.6}
ASKED: tuple[Asked, ...] = (GREEDY, {"temperature": 1.0}, {"temperature": 1.5, "top_p": 0.9})
PENALIZED: Asked = {**NUCLEUS, "presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
TURNS = 12
SURE = 6.0
"""Standard deviations that the log-likelihood of all tokens may be off by chance."""


def batches(engine: str) -> Iterator[tuple[list[int], list[Asked]]]:
    """Yield prompts and the parameters of requests for each in one batch, a greedy one among them; of vLLM's one has penalties and two have
    seeds, a top-k one of these, of SGLang's verification both are other things.

    A batch's prompts fit into a step: vLLM for CPUs (0.24 to 0.32) ends where it cuts a prompt of a request with a seed."""
    for turn in range(TURNS):
        seeded = [one | {"seed": turn} for one in (NUCLEUS, {"temperature": 1.0, "top_k": 5})]
        own = [PENALIZED, *seeded] if engine == "vllm" else [NUCLEUS] * 3
        yield [3 + (turn + 7 * place) % 29 for place in range(4)], [*ASKED, *ASKED[1:], *own]


def distributions(
    logits: torch.Tensor, prompt: list[int], answer: list[int], asked: Asked, edge: float
) -> torch.Tensor:
    """Return the log-probabilities [n, V] that the tokens of an answer were to be drawn with, -inf for what is cut off.

    ``logits`` [n, V] are the target's at each of the tokens, ``asked`` a request's sampling parameters; a token that lies beyond the
    nucleus by no more mass than ``edge``, or is less likely than its last one by no more than that part, may be drawn."""
    rows, size = logits.double(), logits.shape[1]
    counts = (came := torch.nn.functional.one_hot(torch.tensor(answer), size)).cumsum(0) - came
    seen = counts.bool().index_fill(1, torch.tensor(prompt), True)
    factor = torch.where(seen, asked.get("repetition_penalty", 1.0), 1.0)
    rows = torch.where(rows > 0, rows / factor, rows * factor)
    rows = rows - asked.get("frequency_penalty", 0.0) * counts
    rows = rows - asked.get("presence_penalty", 0.0) * counts.bool()
    best = (rows / (asked["temperature"] or 1)).softmax(-1).sort(descending=True)
    most = asked.get("top_k", size) if asked["temperature"] else 1
    mass = best.values * (torch.arange(size) < most)
    mass = mass / mass.sum(-1, keepdim=True)
    before = mass.cumsum(-1) - mass
    beyond = (mass == 0) | (before >= asked.get("top_p", 1.0) + edge)
    least = best.values.masked_fill(beyond, 1.0).amin(-1, keepdim=True) * (1 - edge)
    kept = best.values * (best.values >= least)  # what is as likely as the last one may be drawn in its place
    chances = (kept / kept.sum(-1, keepdim=True)).log()
    return chances.scatter(1, best.indices, chances)


class Tally:
    """Judge sampled answers: tokens outside the nucleus, how likely all are, how often two answers to one prompt are the same by more
    than chance, as where requests share a seed (a rare token weighs more), and the log-probabilities that the engine returned.

    ``close`` is by how much an engine's log-probabilities may be off."""

    def __init__(self, close: float) -> None:
        self._close = close
        self.tokens, self.outside, self.worst = 0, 0, 0.0
        self._surprise, self._variance, self._alike, self._spread = 0.0, 0.0, 0.0, 0.0
        self._prompt, self._beside = list[int](), list[tuple[list[int], torch.Tensor, torch.Tensor]]()

    def add(
        self,
        logits: torch.Tensor,
        prompt: list[int],
        asked: Asked,
        tokens: list[int],
        given: list[float],
        returned: str,
    ) -> None:
        """Take an answer along, whose log-probabilities ``given`` are those of the ``raw`` logits, or at the temperature ``asked`` for.

        Those to one prompt come one after the other."""
        at = torch.arange(len(logits)), torch.tensor(tokens)
        drawn = distributions(logits, prompt, tokens, asked, self._close)
        inside, chance = drawn[at].isfinite(), drawn.exp()
        known = drawn.masked_fill(drawn.isinf(), 0.0)
        mean = (chance * known).sum(-1)
        self._surprise += float((known[at] - mean)[inside].sum())
        self._variance += float(((chance * known**2).sum(-1) - mean**2)[inside].sum())
        self.tokens, self.outside = self.tokens + len(inside), self.outside + int((~inside).sum())
        if prompt != self._prompt:
            self._prompt, self._beside = prompt, []
        for others, chances, logs in self._beside:
            first = next((at for at, pair in enumerate(zip(tokens, others)) if len({*pair}) > 1), len(tokens))
            both, rare = (
                (chance * chances)[: first + 1],
                -(known + logs)[: first + 1],
            )  # up to the first that differs
            mean = (both * rare).sum(-1)
            self._alike += float(rare.gather(1, at[1][: first + 1, None])[:first].sum() - mean.sum())
            self._spread += float(((both * rare**2).sum(-1) - mean**2).sum())
        self._beside.append((tokens, chance, known))
        warm = (logits / (asked["temperature"] or 1.0)).log_softmax(-1)
        wanted = (logits.log_softmax(-1) if returned == "raw" else warm)[at]
        self.worst = max(self.worst, float((wanted - torch.tensor(given)).abs().max()))

    @property
    def off(self) -> float:
        """By how many standard deviations the likelihood of all tokens is another than it was to be."""
        return abs(self._surprise) / max(self._variance, 1e-30) ** 0.5

    @property
    def shared(self) -> float:
        """By how many standard deviations more tokens of two answers are the same than if each is drawn by itself."""
        return self._alike / max(self._spread, 1e-30) ** 0.5

    @property
    def good(self) -> bool:
        known = self.off < SURE and self.shared < SURE
        return not self.outside and known and self.worst < self._close
