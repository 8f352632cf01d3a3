"""A made-up language, letter by letter, and how its speakers come to speak another.

A dialect has its own words and its own order of them. A text is numbered sentences; every now and then an
earlier one is told again, which needs a look far back. How a word begins is a free choice, how it goes on is
not, so a reader that knows the dialect can guess several letters ahead, and one that does not cannot.

    14 mira toket luno. 15 sebu danor pilek. 16 again mira toket luno. 17 ...
"""

from __future__ import annotations

import random
from collections.abc import Iterator

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,;:"
VOCABULARY = 64
"""Tokens of the model: padding, begin, end, the letters, and some that nothing uses."""
_FIRST = 3
_ORDERS = ((0, 1, 2), (1, 0, 2), (2, 0, 1))  # of who, does, what
_AGAIN = 0.35  # share of sentences that are told again


class Dialect:
    """Words and order of one dialect, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"dialect-{seed}")
        self._words = [_words(draw, number) for number in (12, 8, 12)]
        self._order = _ORDERS[seed % len(_ORDERS)]
        [self._again] = _words(draw, 1)

    def text(self, draw: random.Random, length: int) -> str:
        """A text of exactly ``length`` letters, from the start of a sentence."""
        parts, told, number, size = [], [], draw.randrange(10, 60), 0
        while size < length:
            again = len(told) > 1 and draw.random() < _AGAIN
            words = draw.choice(told[-3:]) if again else [draw.choice(words) for words in self._words]
            said = " ".join(words[place] for place in self._order)
            parts.append(f"{number % 100:02} {self._again + ' ' if again else ''}{said}. ")
            if not again:
                told.append(words)
            size += len(parts[-1])
            number += 1
        return "".join(parts)[:length]


class Drift:
    """A mixture of dialects that moves from the first to the last, in the course of a run."""

    def __init__(self, dialects: int = 3) -> None:
        self._dialects = [Dialect(seed) for seed in range(dialects)]

    def texts(self, at: float, length: int, draw: random.Random) -> Iterator[list[int]]:
        """Texts as token ids, without end. ``at``: 0 for the first dialect alone, 1 for the last."""
        last = len(self._dialects) - 1
        place, share = divmod(at * last, 1.0)
        while True:
            number = min(last, int(place) + (draw.random() < share))
            yield encode(self._dialects[number].text(draw, length))

    def prompts(self, at: float, number: int, seed: int) -> list[list[int]]:
        """Beginnings of texts, two sentences and a bit."""
        draw = random.Random(f"prompts-{seed}")
        texts = self.texts(at, 48, draw)
        return [next(texts) for _ in range(number)]


def encode(text: str) -> list[int]:
    """Token ids."""
    return [_FIRST + LETTERS.index(letter) for letter in text]


def decode(ids: list[int]) -> str:
    """What `encode` was given; tokens that are no letters become question marks."""
    return "".join(LETTERS[i - _FIRST] if _FIRST <= i < _FIRST + len(LETTERS) else "?" for i in ids)


def _words(draw: random.Random, number: int) -> list[str]:
    found: set[str] = set()
    while len(found) < number:
        syllables = draw.choice((2, 2, 3))
        word = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(syllables))
        found.add(word + draw.choice(("", "n", "r", "k", "t")))
    return sorted(found)
