"""Choose how many guesses of each request to verify, so that a step gives the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence


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
        tokens: expected tokens of the step without these guesses; None: one per request.
    """
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
