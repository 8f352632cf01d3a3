"""Draft for the requests of one engine from what was generated before, and learn from what is accepted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flashpatch.patches.eagle.history.step_cost import StepCost
from flashpatch.patches.eagle.history.token_index import Guess, TokenIndex

_MATCHES = (4, 6, 10, 18)  # a match of at least so many tokens is of the next kind
_WINDOW = 200.0  # outcomes that are remembered per kind
_PRIOR = 4.0  # outcomes that the first estimate is worth


class AcceptanceTable:
    """Estimate the chance that the target accepts a guess whose predecessors it accepted.

    Guesses are of one kind if source, length of match, votes and their share are alike. Outcomes are forgotten
    exponentially, as the policy changes.

    Args:
        sources: how many sources there are."""

    def __init__(self, sources: int) -> None:
        kinds = sources * (len(_MATCHES) + 1) * 9
        self._tried = [0.0] * kinds
        self._accepted = [0.0] * kinds

    def chances(self, source: int, guesses: Iterable[Guess]) -> list[float]:
        """Return for each guess the chance that it and all before it are accepted."""
        found, chance = [], 1.0
        for guess in guesses:
            kind = self._kind(source, guess)
            first = 0.9 * guess.votes / (guess.total + 0.5)
            chance *= (self._accepted[kind] + _PRIOR * first) / (self._tried[kind] + _PRIOR)
            found.append(chance)
        return found

    def learn(self, source: int, guesses: Sequence[Guess], accepted: int) -> None:
        """Learn from a verified draft, of whose guesses the first ``accepted`` were accepted."""
        for place, guess in enumerate(guesses[: accepted + 1]):
            kind = self._kind(source, guess)
            keep = 1.0 - 1.0 / _WINDOW
            self._tried[kind] = self._tried[kind] * keep + 1.0
            self._accepted[kind] = self._accepted[kind] * keep + (place < accepted)

    def _kind(self, source: int, guess: Guess) -> int:
        match = sum(guess.match >= least for least in _MATCHES)
        votes = min(guess.votes, 3) - 1
        share = 2 if guess.votes == guess.total else int(guess.votes >= 0.6 * guess.total)
        return ((source * (len(_MATCHES) + 1) + match) * 3 + votes) * 3 + share


_PROMPT, _ANY = range(2)  # sources: texts of the same prompt, texts of any prompt
_ORDERS = {_PROMPT: 2, _ANY: 3}
_PROBE_STEPS = 32
"""Steps without a draft after which one token is drafted to see what it costs; doubled each time."""
_MOST_PROBE_STEPS = 512

MAX_DRAFTS = 8
"""Tokens drafted per request and step on an engine without a drafter."""


class Draft(NamedTuple):
    """Hold the guesses that a request verifies next, and their source."""

    source: int
    guesses: Sequence[Guess]


class Text:
    """Hold the tokens of one request, prompt and answer, with the index of its prompt."""

    __slots__ = ("draft", "index", "tokens")

    def __init__(self, tokens: list[int], index: TokenIndex) -> None:
        self.tokens, self.index = tokens, index
        self.draft: Draft | None = None


class HistoryDrafts:
    """Propose drafts for each step of one engine.

    Call `begin` for a new request, `extend` with its new tokens, `propose` before a step and `learn` after it.

    Args:
        capacity: tokens that are remembered, for prompts and over all prompts each.
        clock: seconds.

    Attributes:
        drafts: drafts verified; drafted, accepted: tokens of them. All since the start.
        seconds: time spent here."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.capacity, self._clock = capacity, clock
        self._prompts: OrderedDict[tuple[int, ...], TokenIndex] = OrderedDict()
        self._most = 0  # tokens that all their indexes hold at most
        self._any = TokenIndex(_ORDERS[_ANY], max(1, capacity // 2))
        self._acceptance = AcceptanceTable(sources=2)
        self._cost = StepCost()
        self._rivals = DrafterAcceptance()
        self._idle, self._probe_after = 0, _PROBE_STEPS  # steps since the last draft, and until the next
        self.drafts = self.drafted = self.accepted = 0
        self.seconds = 0.0

    def begin(self, prompt: Sequence[int]) -> Text:
        """Return the text of a new request, and index its prompt unless it is known."""
        key = tuple(prompt)
        index, text = self._prompts.get(key), list(prompt)
        if index is None:
            index = self._prompts[key] = TokenIndex(_ORDERS[_PROMPT], max(1, self.capacity // 8))
            index.extend(text, 0)
            self._most += len(text)
            if self._most > self.capacity:
                self._most = sum(map(len, self._prompts.values()))
            if self._most > self.capacity:  # some more go, so that they need not be counted again at once
                while self._most > self.capacity * 7 // 8 and len(self._prompts) > 1:
                    self._most -= len(self._prompts.popitem(last=False)[1])
        else:
            self._prompts.move_to_end(key)
        return Text(text, index)

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Append and index tokens that were generated."""
        start = len(text.tokens)
        self._most += len(tokens)
        text.tokens.extend(tokens)
        text.index.extend(text.tokens, start)
        self._any.extend(text.tokens, start)

    def propose(
        self, texts: Sequence[Text], room: Sequence[int], rivals: Sequence[int] = (), free: bool = False
    ) -> list[list[int] | None]:
        """Return the draft tokens of each request of the next step; None if the drafts it has are better.

        Args:
            texts: the requests that decode in that step.
            room: draft tokens that each of them has room for.
            rivals: draft tokens that each of them has from another drafter; empty: there is none.
            free: the engine's steps take as long whatever is drafted."""
        began = self._clock()
        rivals = rivals or [0] * len(texts)
        for text in texts:
            text.draft = None
        cost = (1.0, 0.0) if free else self._cost.estimate(len(texts))
        if cost is None:  # the first step of all is measured without drafts of ours
            return [None] * len(texts)
        found = []
        tokens, (seconds, slope) = float(len(texts)), cost
        for text, most, rival in zip(texts, room, rivals, strict=True):
            draft, chances = self._best(text, most)
            expected = self._rivals.expected(rival)
            if rival and sum(chances) <= expected:
                draft, chances = None, []
                tokens += expected
                seconds += slope * rival
            found.append((draft, chances))
        lengths = draft_lengths([chances for _, chances in found], seconds, slope, tokens)
        if any(lengths):
            self._idle, self._probe_after = 0, _PROBE_STEPS
        else:
            self._probe(lengths, [chances for _, chances in found])
        proposed: list[list[int] | None] = []
        for text, (draft, _), length in zip(texts, found, lengths, strict=True):
            if draft is None:
                proposed.append(None)
                continue
            text.draft = Draft(draft.source, draft.guesses[:length]) if length else None
            proposed.append([guess.token for guess in draft.guesses[:length]])
        self.seconds += self._clock() - began
        return proposed

    def learn_rival(self, drafted: int, accepted: int) -> None:
        """Learn from a verified draft of another drafter."""
        self._rivals.learn(drafted, accepted)

    def learn(
        self, outcomes: Mapping[Text, int], batch_size: int, draft_tokens: int, seconds: float | None
    ) -> None:
        """Learn from a step.

        Args:
            outcomes: accepted tokens of the requests that verified what `propose` returned.
            batch_size: requests in the step.
            draft_tokens: tokens verified in all, those of other drafters included.
            seconds: time of the step; None if it did more than decode."""
        for text, accepted in outcomes.items():
            if text.draft is not None:
                self._acceptance.learn(text.draft.source, text.draft.guesses, accepted)
                self.drafts += 1
                self.drafted += len(text.draft.guesses)
                self.accepted += accepted
        if seconds is not None:
            self._cost.observe(batch_size, draft_tokens, seconds)

    def metrics(self) -> dict[str, Any]:
        """Return counts since the start, for the ledger."""
        return {
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "prompts": len(self._prompts),
            "tokens": len(self._any),
            "seconds": round(self.seconds, 3),
        }

    def _best(self, text: Text, most: int) -> tuple[Draft, list[float]]:
        """Return the draft of which most tokens are expected to be accepted, and its chances."""
        best, best_chances = Draft(_PROMPT, ()), []
        for source, index in ((_PROMPT, text.index), (_ANY, self._any)):
            guesses = index.predict(text.tokens, most)
            chances = self._acceptance.chances(source, guesses)
            if sum(chances) > sum(best_chances):
                best, best_chances = Draft(source, guesses), chances
        return best, best_chances

    def _probe(self, lengths: list[int], chances: list[list[float]]) -> None:
        """Draft the likeliest token after long without any: what drafts cost may have changed."""
        self._idle += 1
        if self._idle >= self._probe_after and any(chances):
            lengths[max(range(len(chances)), key=lambda row: chances[row][:1])] = 1
            self._idle, self._probe_after = 0, min(2 * self._probe_after, _MOST_PROBE_STEPS)


class DrafterAcceptance:
    """Follow the chance that a draft token of another drafter is accepted if those before it were."""

    def __init__(self) -> None:
        self._tried, self._accepted = 2.0, 1.0

    def learn(self, drafted: int, accepted: int) -> None:
        keep = 0.99
        self._tried = self._tried * keep + min(accepted + 1, drafted)
        self._accepted = self._accepted * keep + accepted

    def expected(self, drafted: int) -> float:
        """Return the tokens expected to be accepted of a draft of so many."""
        chance = self._accepted / self._tried
        return sum(chance**place for place in range(1, drafted + 1))


def draft_lengths(
    chances: Sequence[Sequence[float]], base: float, slope: float, tokens: float | None = None
) -> list[int]:
    """Return for each request how many of its guesses to verify.

    A request gives one token per step, and one more for each accepted guess. Guesses are taken in the order of their
    chance as long as the next one raises the expected tokens per second of the step.

    Args:
        chances: for each request of the batch, for each guess the chance that it and all before it are accepted.
        base: seconds of the step without these guesses.
        slope: seconds that a verified guess adds.
        tokens: expected tokens of the step without these guesses; None: one per request."""
    lengths = [0] * len(chances)
    tokens, seconds = float(len(chances)) if tokens is None else tokens, base
    ordered = sorted(
        ((chance, request) for request, found in enumerate(chances) for chance in found), reverse=True
    )
    for chance, request in ordered:
        if chance * seconds <= slope * tokens:
            break
        tokens += chance
        seconds += slope
        lengths[request] += 1
    return lengths
