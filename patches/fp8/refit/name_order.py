"""Tell from names alone whether what came is one update, where its sender names neither begin nor end.

Such a sender sends the same names in the same order each time. The order of the last update that ended so is kept: its
first name begins another update, and a name that comes again or elsewhere leaves in doubt which tensors belong together.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("flashpatch.fp8")

_ADVICE = (
    "so where its update begins cannot be told: send all of it again from its first tensor or in one call, or name its end "
    "(process_weights_after_loading, finish_weight_update)"
)


class NameOrder:
    """The names of the open update, and the order in which they are due.

    Attributes:
        came: name of a tensor -> the call that brought it.
        doubt: why what came may be of several updates; empty if it is not.
        framed: all came since the sender's last request, or since it said that it begins.
    """

    def __init__(self) -> None:
        self.came: dict[str, int] = {}
        self.doubt = ""
        self.framed = False
        self._due: list[str] = []  # names in order, perhaps only the first ones
        self._known = False  # whether an update in this order was committed

    def whole(self, more: bool = False) -> bool:
        """Whether what came, if it is complete, is one update; ``more``: further tensors may follow before a request."""
        return self.in_one_call or (not more and (self.framed or not self.doubt))

    @property
    def in_one_call(self) -> bool:
        """Whether a single call has brought everything."""
        calls = list(self.came.values())
        return bool(calls) and calls[0] == calls[-1]

    @property
    def unclear(self) -> bool:
        """Whether it has to be begun anew, unless it is whole when the next request comes."""
        return bool(self.doubt) or (self.framed and not self._known)

    def clear(self, framed: bool = False) -> None:
        """Expect another update; ``framed``: its first tensor is the next one, whatever it is."""
        self.came.clear()
        self.doubt, self.framed = "", framed
        if framed and not self._known:
            self._due = []

    def learn(self, named: bool) -> None:
        """Keep the order in which an update came that names alone have ended; ``named``: forget it, ends are told here."""
        if named:
            self._due, self._known = [], False
        elif not self.in_one_call:
            self._due, self._known = list(self.came), True

    def begins(self, name: str, call: int) -> bool:
        """Whether ``name``, the next to come, begins a call and is the one that an update begins with."""
        return name == next(iter(self._due or self.came), None) and call != next(
            reversed(self.came.values()), 0
        )

    def ends(self, name: str, call: int, left: bool = False) -> bool:
        """Whether ``name``, the next to come, shows that earlier calls brought another update: it has come in one of them, or
        an update begins with it and only what another has ``left`` came before."""
        return self.came.get(name, call) != call or (left and self.begins(name, call))

    def restart(self, name: str, call: int, complete: bool) -> None:
        """Forget what earlier calls brought; ``complete``: it was an update of its own, or what completed one."""
        clean = self.begins(name, call) and (not self.doubt or len(self.came) == 1)
        if clean and not self._known:
            self._due = max(self._due, list(self.came), key=len)
        self.came = {name: number for name, number in self.came.items() if number == call}
        self.framed = clean and complete and not self._known
        self.doubt = "" if clean else self.doubt or f"{name} came again, {_ADVICE}"

    def add(self, name: str, call: int) -> None:
        """Note a name that has come."""
        place = len(self.came)
        if (
            self._known
            and name not in self.came
            and self._due[place : place + 1] not in ([], [name])
            and not self.doubt
        ):
            self.doubt = f"{name} came where {self._due[place]} was due, {_ADVICE}"
        self.came[name] = call
