"""Say which tensors make one update, from what senders state. Plain Python: no torch, no model.

A sender that names begin and end (a session) has said it. Without a name two things are one update, and no third:

- one call that brings everything;
- calls from the *anchor* on that have brought each name once; the next request commits them. The anchor is the first name of
  the first such update, also if that one has failed. It always begins anew.

A tensor that comes again with the values that it brought before is nothing. What else comes has no effect: its call raises,
and no request is answered until a whole update has come. A sender that names its ends alone needs no anchor: what has come
since its last end is its update, and no request commits it."""

from __future__ import annotations

import enum
from collections.abc import Hashable

_ADVICE = (
    "so where this update begins cannot be told. Send all of it in one call, {}or name begin and end: "
    "`with flashpatch.update(engine):`, start_weight_update and finish_weight_update"
)


class Step(enum.Enum):
    """What becomes of a tensor that comes."""

    TAKE = "take"
    SKIP = "skip"  # it is in place already
    ANEW = "anew"  # take it, and forget what earlier calls brought


class Boundaries:
    """The names of the open update.

    Attributes:
        ends: a sender has named the end alone of an update: no request ends one of several calls.
        named: somebody has said where the open update begins, and will say where it ends.
        failed: an update has failed since the last begin that was named, and none was committed.
        rest: so has one whose begin was named, and its end was not said yet: what comes may be the rest of it.
        came: name -> number of the call that brought it last."""

    def __init__(self) -> None:
        self.named = self.failed = self.rest = False
        self.came: dict[str, int] = {}
        self.ends = False
        self._anchor: str | None = None  # outlives what is given up
        # what the names brought last that came without a begin and an end; outlives a commit
        self._values: dict[str, Hashable] = {}
        self._alone = 0  # number of a call that counts only if it brings everything
        self._why = ""  # why it does
        self._repeats = True  # whether all of the open update is in place already

    @property
    def given_up(self) -> bool:
        """Whether another update that begins now leaves one unfinished of which nobody is told."""
        return not self.named and bool(self.came)

    def begin(self, named: bool) -> None:
        """Open an update."""
        self.named, self._repeats = named, True
        self.failed, self.rest = self.failed and not named, self.rest and not named
        self.came = {}
        self._alone, self._why = 0, ""

    def arrive(self, name: str, call: int, values: Hashable = None) -> Step:
        """Note a tensor that comes.

        Args:
            name: of the tensor, as its sender calls it.
            call: number of the call that brings it.
            values: tell its values from others; None: not known, as in a named update."""
        if self.named:
            self.came[name] = call
            return Step.TAKE
        step, same = Step.TAKE, values is not None and self._values.get(name) == values
        anchor = self._anchor or next(iter(self.came), "" if self.rest else name)
        if not self.came and name != anchor:
            before = f"where earlier updates began with {anchor}" if anchor else "and a named one has failed"
            self._alone, self._why = call, f"{name} came first, {before}"
        if self.came.get(name, call) != call:
            if name != anchor and same:
                return Step.SKIP
            step = Step.ANEW
            self.came = {one: number for one, number in self.came.items() if number == call}
            self._alone, self._repeats = 0, False
            if name != anchor or self.came:
                self._alone, self._why = call, f"{name} came again with other values"
        self._repeats &= same
        self.came[name], self._values[name] = call, values
        return step

    def keep_anchor(self) -> None:
        """Note that a call was taken that does not bring everything: the next ones belong behind its first name."""
        if not (self.named or self.ends or self._alone):
            self._anchor = self._anchor or next(iter(self.came), None)

    @property
    def doubt(self) -> str:
        """Why what came is of no update, unless one call has brought all of it; empty if it may be."""
        in_order = "or from its first tensor on in the same order, " if self._anchor else ""
        return "" if self.named or not self._alone else f"{self._why}, {_ADVICE.format(in_order)}"

    @property
    def one_call(self) -> bool:
        """Whether a single call has brought all that came."""
        return len(set(self.came.values())) == 1

    @property
    def repeats(self) -> bool:
        """Whether all that came, which does not begin with the anchor, has the values that are in place already."""
        return bool(self.came and self._repeats and self.doubt)

    def commit(self, by_name: bool) -> None:
        """Note that the open update is committed; ``by_name``: its sender has said that it ends."""
        self.named = self.failed = self.rest = False
        if by_name:
            self._values.clear()
            return
        self._values = {name: self._values[name] for name in self.came}

    def end_by_name(self, is_open: bool) -> None:
        """Note that somebody says where updates end, if their begin is not named: no name has to tell where one begins.

        ``is_open``: one is, which may have taken several calls."""
        self.rest &= is_open and self.named
        if not (is_open and self.named):
            self.ends |= is_open and len({*self.came.values()}) > 1
            self._anchor = None

    def fail(self, before_end: bool = False) -> None:
        """Note that the values in place are not those that came; ``before_end``: of an update that is open."""
        self._values.clear()
        self.failed, self.rest = True, self.rest or (before_end and self.named)
