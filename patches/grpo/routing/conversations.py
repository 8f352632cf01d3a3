"""Know the prompt and the turn of each request that verl's client sends.

verl gives every rollout a request id of its own and keeps it for all its turns, and for what is left of a turn after
an abort. The first prompt of an id is the prompt that siblings share: they have its tokens in common, in this epoch
and in others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Digest = tuple[Hashable, int]
"""A prompt's hash and its number of tokens."""


def digest(prompt_ids: Sequence[int] | None) -> Digest:
    """Return a short stand-in for a prompt, the same in all processes. Prompts that differ in images alone are
    one."""
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
        over: whether the turn has ended.
    """

    prompt: Hashable
    prompt_tokens: int = 0
    turn: int = 0
    tokens: int = 0
    over: bool = False

    @property
    def key(self) -> Hashable:
        """What has responses of like length: this turn of this prompt."""
        return self.prompt, self.turn


class Conversations:
    """Find conversations by request id.

    Args:
        remembered: number of them.
    """

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
