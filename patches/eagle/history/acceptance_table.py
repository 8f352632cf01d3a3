"""Learn how often guesses of each kind are accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flashpatch.patches.eagle.history.token_index import Guess

_MATCHES = (4, 6, 10, 18)  # a match of at least so many tokens is of the next kind
_WINDOW = 200.0  # outcomes that are remembered per kind
_PRIOR = 4.0  # outcomes that the first estimate is worth


class AcceptanceTable:
    """Estimate the chance that the target accepts a guess whose predecessors it accepted.

    Guesses are of one kind if source, length of match, votes and their share are alike. Outcomes are forgotten
    exponentially, as the policy changes.

    Args:
        sources: how many sources there are.
    """

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
