"""Find where the last tokens of a text occurred before, and predict by majority what follows."""

from __future__ import annotations

from typing import NamedTuple

MOST_OCCURRENCES = 16
LONGEST_MATCH = 32
"""Tokens that are compared before an occurrence; longer matches count as this long."""
_SUFFICIENT_MATCH = 8  # occurrences that match so many tokens vote beside longer ones


class Guess(NamedTuple):
    """Hold one predicted token.

    Attributes:
        token: its id.
        match: tokens before it that the text has in common with the occurrences that voted.
        votes: occurrences that were followed by it.
        total: occurrences that voted."""

    token: int
    match: int
    votes: int
    total: int


class TokenIndex:
    """Index texts by runs of ``order`` tokens, of each run the last occurrences.

    Texts are lists of token ids that only grow; `extend` indexes what was appended. Memory is bounded: when ``capacity``
    tokens were indexed a new part is begun, and the part before the last is dropped.

    Args:
        order: tokens that an occurrence has in common with the text at least.
        capacity: tokens per part."""

    def __init__(self, order: int, capacity: int) -> None:
        self.order, self.capacity = order, capacity
        self._places: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}
        self._older: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}
        self._indexed = self._indexed_older = 0

    def __len__(self) -> int:
        """Return the number of tokens that are indexed."""
        return self._indexed + self._indexed_older

    def extend(self, text: list[int], start: int) -> None:
        """Index the tokens of ``text`` from position ``start`` on."""
        if self._indexed >= self.capacity:
            self._older, self._indexed_older = self._places, self._indexed
            self._places, self._indexed = {}, 0
        order, places = self.order, self._places
        for place in range(max(start, order), len(text)):
            key = tuple(text[place - order : place])
            found = places.get(key)
            if found is None:
                places[key] = [(text, place)]
            else:
                if len(found) == MOST_OCCURRENCES:
                    del found[0]
                found.append((text, place))
        self._indexed += len(text) - start

    def predict(self, text: list[int], most: int) -> list[Guess]:
        """Return up to ``most`` tokens that may follow ``text``; none if its last tokens never occurred."""
        alive, match = self._longest_matches(text)
        guesses: list[Guess] = []
        while len(guesses) < most:
            votes: dict[int, int] = {}
            for tokens, place in alive:
                if place < len(tokens):
                    token = tokens[place]
                    votes[token] = votes.get(token, 0) + 1
            if not votes:
                break
            # of equals that of the newest occurrence, which is first
            best = max(votes, key=votes.__getitem__)
            guesses.append(Guess(best, match + len(guesses), votes[best], sum(votes.values())))
            alive = [
                (tokens, place + 1)
                for tokens, place in alive
                if place < len(tokens) and tokens[place] == best
            ]
        return guesses

    def _longest_matches(self, text: list[int]) -> tuple[list[tuple[list[int], int]], int]:
        """Return the occurrences with the longest match, the newest first, and its length."""
        order = self.order
        if len(text) < order:
            return [], 0
        key = tuple(text[-order:])
        places = self._places.get(key, ())
        if len(places) < MOST_OCCURRENCES and key in self._older:
            places = [*self._older[key][len(places) - MOST_OCCURRENCES :], *places]
        if not places:
            return [], 0
        limit = min(len(text), LONGEST_MATCH)
        matches = []
        for tokens, place in reversed(places):
            match, most = order, min(limit, place)
            while match < most and tokens[place - 1 - match] == text[-1 - match]:
                match += 1
            matches.append(match)
        longest = max(matches)
        least = min(longest, _SUFFICIENT_MATCH)
        chosen = [where for where, match in zip(reversed(places), matches, strict=True) if match >= least]
        return chosen, longest
