"""What a sequence of update calls must lead to: the specification, in plain Python. It shares no code with the product.

A `Spec` follows one model. A policy is a mapping of tensor name to the seed of the checkpoint it is from: two seeds in one
policy that was not sent so are a mixture. What was committed last is `served`. Each method stands for one call and says how
it must end: `OK`, `FAILS` or `MAY_FAIL`.

Which tensors make an update:

- between a begin and an end that are named, all that comes;
- a call that brings every name;
- calls from the anchor on that bring every name once, when a request comes. The anchor is the first name of the first update
  that was committed so, before that the first name of the open one; whatever is open when it comes is dropped;
- all that came since the last end, for a sender that names its ends alone. It has no anchor.

A name that comes again with another value, or another name than the anchor at the beginning, leaves it open what belongs
together: that call fails, unless it brings every name, and nothing is served until a whole update is committed.
"""

from collections.abc import Iterable, Mapping

OK, FAILS, MAY_FAIL = "ok", "fails", "may fail"

Policy = Mapping[str, int]


class Spec:
    """The state of one model.

    Args:
        layers: tensor name to the layer that it belongs to.
        required: names that a complete update brings.
        deferred: layers that are put in place by the commit alone.
        first: the policy it was opened on.
        atomic, partial: the family's options.
        unknown: nothing has shown yet whether checkpoints bring its buffers, so that only a named end can leave them out.

    Attributes:
        served: the policies that the next answer may be of; more than one where a call leaves it open.
        came: what the open update has brought; None for a value that must not be committed.
        broken: nothing may be generated until a complete update.
    """

    def __init__(
        self,
        layers: Mapping[str, str],
        required: Iterable[str],
        deferred: Iterable[str],
        first: Policy,
        atomic: str,
        partial: bool,
        unknown: bool = False,
    ) -> None:
        self.layers, self.required, self.deferred = dict(layers), frozenset(required), frozenset(deferred)
        self.atomic, self.partial, self.unknown = atomic, partial, unknown
        self.served: list[Policy] = [dict(first)]
        self.version = 0
        self.is_open = self.named = self.left_out = self.broken = self.discarded = False
        self.came: dict[str, int | None] = {}
        self._brought_by: dict[str, int] = {}  # name -> call
        self._last: dict[str, int | None] = {}  # what names brought last without a begin and an end
        self._anchor: str | None = None
        self._placed = self._in_doubt = self._doubted = False
        self._call = 0
        self._ending = ""  # how the call under way commits: "by name", "by request"
        self._commits: list[Policy] = []  # what it commits if it succeeds

    @property
    def serves(self) -> bool:
        """Whether the model must answer now; where not, it must refuse."""
        if self.broken or self.discarded:
            return False
        return not self.is_open or (self.atomic == "model" and self.named)

    @property
    def complete(self) -> bool:
        """Whether the open update has brought everything."""
        return self.required <= self.came.keys()

    @property
    def in_one_call(self) -> bool:
        """Whether one call has brought all that came."""
        return len(set(self._brought_by.values())) == 1

    @property
    def hopeless(self) -> bool:
        """Whether no update can be opened: there is nothing that atomic='model' could fall back to."""
        return self.discarded and self.atomic == "model"

    def begin(self) -> str:
        """An update is opened by name."""
        if self.hopeless:
            return FAILS
        self._open(named=True)
        return OK

    def load(self, items: Iterable[tuple[str, int | None]], partial: bool | None = None) -> str:
        """A bucket comes; None in place of a seed: NaN."""
        if self.hopeless:
            return FAILS
        if not self.is_open:
            self._open(named=False)
        self._call += 1
        outcome, completed, reopened, skipped = OK, set(), set(), 0
        placed = {layer for layer in set(self.layers.values()) - self.deferred if self._has_come(layer)}
        repeated, new = True, bool(self.came)
        for name, seed in items:
            layer = self.layers[name]
            if self._brought_by.get(name) == self._call or layer in completed:
                outcome = MAY_FAIL  # twice in one call, or too late for a new start: refused, or the later one counts
            known = self._last.get(name, ()) == seed
            if self.named and layer in placed - reopened:
                reopened.add(layer)
                for other in self._of(layer):
                    del self.came[other], self._brought_by[other]
            elif not self.named:
                if not self.came and self._anchor not in (None, name):
                    self._in_doubt = True
                if self._brought_by.get(name, self._call) != self._call:
                    anchor = self._anchor or next(iter(self.came))
                    if known and name != anchor:
                        skipped += 1
                        continue
                    self._start_anew()
                    self._in_doubt = name != anchor or bool(self.came)
                    new = True
            self._brought_by[name] = self._call
            self.came[name] = seed
            if not self.named:
                repeated, self._last[name] = repeated and known, seed
            if self._has_come(layer) and layer not in self.deferred:
                completed.add(layer)
                at_once = {self._brought_by[other] for other in self._of(layer)} == {self._call}
                self._placed |= at_once and not known
                if None in self._of(layer).values() and at_once:
                    return FAILS
        completed = {layer for layer in completed if self._has_come(layer)}
        self._placed |= bool(completed)
        if any(None in self._of(layer).values() for layer in completed):
            return FAILS
        self.left_out |= bool(partial)
        if not self.named and (not self.came or (repeated and self._in_doubt and not new)):
            self._close()  # what is in place already
            return outcome
        if partial and not self.named:
            ending = self.finish(None)
            return outcome if ending == OK else ending
        if self._in_doubt and not (self.complete and self.in_one_call):
            self._doubted = True
            return FAILS
        return outcome

    def finish(self, partial: bool | None, by: str = "name") -> str:
        """The open update is ended."""
        if not self.is_open:
            if not self.broken:
                self._anchor = None
            return FAILS if self.broken else OK
        allowed = (self.left_out or self.partial) if partial is None else partial
        if allowed and not self.came:
            self._close()
            return OK
        if None in self.came.values():
            return FAILS
        cut = any(not self._has_come(self.layers[name]) for name in self.came if name in self.required)
        if not self.complete and (not allowed or cut or self.discarded):
            return FAILS
        whole, mixture = dict(self.came), {**self.served[0], **self.came}
        self._commits = [whole] if self.complete else []
        if allowed and not self.discarded and mixture not in self._commits:
            self._commits.append(mixture)
        self._ending = by
        return MAY_FAIL if self.broken and not self.complete else OK

    def request(self, more: bool = False) -> str:
        """A request comes, or with ``more`` another call alone: what could end without a name does."""
        unnamed = self.is_open and not self.named and not self.unknown
        if unnamed and self.complete and (self.in_one_call or not more):
            return self.finish(False, by="request")
        return OK

    def succeeded(self) -> None:
        """The call has returned."""
        if not self._commits:
            return
        self.served, self._commits = self._commits, []
        self.version += 1
        if self._ending == "name":
            self._last.clear()
            self._anchor, self.unknown = None, False
        elif not self.in_one_call:
            self._anchor = self._anchor or next(iter(self.came))
        self._close()
        self.broken = self.discarded = False

    def failed(self) -> None:
        """The call has raised, and so the update is abandoned."""
        self._commits = []
        self._last.clear()
        if self.atomic == "layer" or self._doubted or self.broken:
            self.broken = True
        self._close()

    def discard(self) -> None:
        """Sleep level 2."""
        self._last.clear()
        self._close()
        self.broken = self.discarded = True

    def _open(self, named: bool) -> None:
        self._note_mixture()
        self._close()
        self.is_open, self.named = True, named

    def _close(self) -> None:
        self.is_open = self.named = self.left_out = self._placed = self._in_doubt = self._doubted = False
        self.came.clear()
        self._brought_by.clear()

    def _start_anew(self) -> None:
        """What earlier calls brought was another update."""
        self._note_mixture()
        self._placed = False
        self._brought_by = {name: call for name, call in self._brought_by.items() if call == self._call}
        self.came = {name: self.came[name] for name in self._brought_by}

    def _note_mixture(self) -> None:
        """The open update is dropped: layers of it may be in place."""
        if self.atomic == "layer" and self._placed:
            self.broken = True

    def _of(self, layer: str) -> dict[str, int | None]:
        return {name: seed for name, seed in self.came.items() if self.layers[name] == layer}

    def _has_come(self, layer: str) -> bool:
        needed = {name for name in self.required if self.layers[name] == layer}
        return bool(needed) and needed <= self.came.keys()
