"""Know the prompt and the turn of each request, and predict how many tokens a response will have, from other responses to
the same prompt.

verl gives every rollout a request id of its own and keeps it for all its turns, and for what is left of a turn after
an abort. The first prompt of an id is the prompt that siblings share: they have its tokens in common, in this epoch
and in others.

Lengths are taken as log-normal. A prompt's own mean is drawn towards the mean of all prompts, the more so the
less is known of it and the less responses to one prompt have in common: both spreads are measured as responses
end, so that prompts which tell nothing of their responses are not believed. What is remembered of a prompt is
its distance from the mean of its time, and lasts over epochs in which all lengths drift. A response that
already runs longer than expected says that its siblings will be long too, as in Seer (arXiv 2511.14617)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_EVIDENCE = 8
"""The spreads assumed at first count as much as so many responses."""
_MEMORY = 20_000
"""Responses over which the mean, the spreads and the rate are taken."""
_OWN = 16
"""Responses over which a prompt's own mean is taken."""

Digest = tuple[Hashable, int]
"""A prompt's hash and its number of tokens."""


def digest(prompt_ids: Sequence[int] | None) -> Digest:
    """Return a short stand-in for a prompt, the same in all processes. Prompts that differ in images alone are one."""
    ids = tuple(map(int, prompt_ids)) if prompt_ids is not None else ()
    return hash(ids), len(ids)


@dataclass(slots=True)
class Conversation:
    """Hold where a request id is.

    Attributes:
        prompt: hash of its first prompt.
        prompt_tokens: tokens of that.
        turn: number of the turn, from 0.
        tokens: what the turn has so far.
        over: whether the turn has ended."""

    prompt: Hashable
    prompt_tokens: int = 0
    turn: int = 0
    tokens: int = 0
    over: bool = False

    @property
    def key(self) -> Hashable:
        """Return what responses of like length share: this turn of this prompt."""
        return self.prompt, self.turn


class Conversations:
    """Find conversations by request id.

    Args:
        remembered: number of them."""

    def __init__(self, remembered: int = 100_000) -> None:
        self.remembered = remembered
        self._known: OrderedDict[str, Conversation] = OrderedDict()

    def begin(self, request_id: str, prompt: Digest) -> Conversation:
        """Return the conversation of a new request, at its turn: the next one, unless the last was aborted."""
        one = self._known.get(request_id)
        if one is None:
            one = self._known[request_id] = Conversation(*prompt)
            if len(self._known) > self.remembered:
                self._known.popitem(last=False)
        elif one.over:
            one.turn, one.tokens, one.over = one.turn + 1, 0, False
        return one


@dataclass(slots=True)
class _Prompt:
    """Hold what is known of a prompt: number and mean distance (in log tokens) of its ended responses, and when
    those that run were started."""

    ended: int = 0
    distance: float = 0.0
    starts: list[float] = field(default_factory=list)


class Lengths:
    """Predict lengths of responses in tokens. It has no clock: callers give times in seconds.

    Args:
        expected: tokens of a response while none has ended.
        remembered: number of prompts remembered.

    Attributes:
        responses: number of those that have ended."""

    def __init__(self, expected: int = 1024, remembered: int = 100_000) -> None:
        self.remembered = remembered
        self._prompts: OrderedDict[Hashable, _Prompt] = OrderedDict()
        self.responses = 0
        self._mean = math.log(max(expected, 1))
        self._longest = max(expected, 1)
        # Variances: of all responses; of those that had siblings, and of these around their siblings.
        self._spread, self._siblings, self._apart = 1.0, 1.0, 0.25
        self._pairs = 0
        self._rate, self._rates = 0.0, 0  # tokens per second, and of how many responses

    def started(self, prompt: Hashable, now: float) -> None:
        """Note that a response was started."""
        self._of(prompt).starts.append(now)

    def stopped(self, prompt: Hashable, started: float) -> None:
        """Note that a response which was started then no longer runs."""
        starts = self._of(prompt).starts
        if started in starts:
            starts.remove(started)

    def ended(self, prompt: Hashable, tokens: int, seconds: float = 0.0) -> None:
        """Learn from a response that is complete; ``seconds`` is what it took, 0 when that is not known."""
        one, length = self._of(prompt), math.log(max(tokens, 1))
        self.responses += 1
        self._longest = max(self._longest, tokens)
        new = 1 / min(self.responses + _EVIDENCE, _MEMORY)
        distance = length - self._mean
        self._spread += (distance**2 - self._spread) * new
        if one.ended:
            self._pairs += 1
            share = 1 / min(self._pairs + _EVIDENCE, _MEMORY)
            apart = (distance - one.distance) ** 2 * one.ended / (one.ended + 1)
            self._apart += (apart - self._apart) * share
            self._siblings += (distance**2 - self._siblings) * share
        self._mean += (length - self._mean) * max(new, 1 / (self.responses + 1))
        one.distance += (length - self._mean - one.distance) / (one.ended + 1)
        one.ended = min(one.ended + 1, _OWN)
        if seconds > 1e-6:
            self._rates = min(self._rates + 1, _MEMORY)
            self._rate += (tokens / seconds - self._rate) / self._rates

    def known(self, prompt: Hashable) -> bool:
        """Whether a response to this prompt has ended."""
        one = self._prompts.get(prompt)
        return one is not None and one.ended > 0

    def running(self, prompt: Hashable) -> bool:
        """Whether a response to this prompt runs."""
        one = self._prompts.get(prompt)
        return one is not None and bool(one.starts)

    def expect(self, prompt: Hashable, now: float) -> float:
        """Return the expected tokens of a further response to a prompt."""
        one = self._prompts.get(prompt)
        alike = min(1.0, max(0.01, self._apart / max(self._siblings, 1e-9)))
        within = max(self._spread * alike, 1e-9)
        between = max(self._spread - within, 0.0)
        number, distance = (one.ended, one.distance) if one is not None else (0, 0.0)
        weight = number * between / (number * between + within)
        if one is not None and one.starts and self._rate:
            so_far = min((now - one.starts[0]) * self._rate, 2 * self._longest)
            long = math.log(max(so_far, 1.0)) - self._mean
            if long > weight * distance:
                seen = _beyond(weight * distance, within + between * (1 - weight), long)
                distance = (number * distance + seen) / (number + 1)
                weight = (number + 1) * between / ((number + 1) * between + within)
        spread = within + between * (1 - weight)
        expected = math.exp(min(self._mean + weight * distance + spread / 2, 100.0))
        return min(expected, 4.0 * self._longest)

    def _of(self, prompt: Hashable) -> _Prompt:
        one = self._prompts.get(prompt)
        if one is None:
            one = self._prompts[prompt] = _Prompt()
            if len(self._prompts) > self.remembered:
                self._prompts.popitem(last=False)
        else:
            self._prompts.move_to_end(prompt)
        return one


def _beyond(mean: float, spread: float, least: float) -> float:
    """Return the mean of a normal variable that is above ``least``; ``spread`` is its variance."""
    deviation = math.sqrt(max(spread, 1e-9))
    at = (least - mean) / deviation
    if at > 5:
        return least + deviation / at  # what it tends to
    tail = math.erfc(at / math.sqrt(2)) / 2
    return mean + deviation * math.exp(-at * at / 2) / math.sqrt(2 * math.pi) / tail
