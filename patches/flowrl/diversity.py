"""Count how many different solutions the responses to a prompt are, without a judge. Plain Python.

The paper (arXiv 2509.15207, section 5) asks a language model how different solutions are. Here two responses are the
same solution when they are equal after normalisation, or share most of their runs of three words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

SAME = 0.8
"""Two responses are one solution when they share this part of all their runs of three words (Jaccard index)."""

_DROPPED = re.compile(r"[^\w+\-*/=<>^.]+")
_AROUND_OPERATORS = re.compile(r" ?([+\-*/=<>^]) ?")


def normalize(text: str) -> str:
    """Return a response in lower case: words and numbers with one space between them, operators without."""
    return _AROUND_OPERATORS.sub(r"\1", _DROPPED.sub(" ", text.casefold())).strip(" .")


def solutions(responses: Iterable[str]) -> list[int]:
    """Return how many responses each different solution has, in the order in which the solutions appear.

    A response joins the first solution whose first response it resembles.
    """
    counts: dict[str, int] = {}
    for text in map(normalize, responses):
        counts[text] = counts.get(text, 0) + 1
    found: list[tuple[frozenset[tuple[str, ...]], int]] = []
    for text, count in counts.items():
        words = text.split()
        runs = frozenset(zip(words, words[1:], words[2:], strict=False))
        for at, (first, sofar) in enumerate(found):
            if runs and len(runs & first) >= SAME * len(runs | first):
                found[at] = first, sofar + count
                break
        else:
            found.append((runs, count))
    return [count for _, count in found]


def effective(counts: Sequence[int]) -> float:
    """Return the number of equally frequent solutions with the same entropy; 0 for none."""
    total = sum(counts)
    return math.exp(-sum(count / total * math.log(count / total) for count in counts)) if total else 0.0


def measure(groups: Mapping[str, Sequence[tuple[str, bool]]]) -> dict[str, float]:
    """Return metrics of the responses to some prompts.

    Args:
        groups: by prompt, each response and whether it is right.

    Returns:
        ``flowrl/diversity/solutions``, different solutions per prompt, and of those prompts that have a right
        response ``flowrl/diversity/right_solutions``, different ones among the right, and
        ``flowrl/diversity/effective_right_solutions``, their `effective` number. Means over prompts; the last two
        are missing if no prompt has a right response.
    """
    every = [len(solutions(text for text, _ in group)) for group in groups.values() if group]
    right = [solutions(text for text, ok in group if ok) for group in groups.values()]
    right = [counts for counts in right if counts]
    means = {
        "solutions": every,
        "right_solutions": [len(counts) for counts in right],
        "effective_right_solutions": [effective(counts) for counts in right],
    }
    return {f"flowrl/diversity/{name}": sum(values) / len(values) for name, values in means.items() if values}
