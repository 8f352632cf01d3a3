"""What a sequence of update calls must lead to, worked out from the names that came and nothing else.

A `Spec` follows one model. A policy is a mapping of tensor name to the seed of the checkpoint it is from; what was
committed last is `served`. Each method stands for one call and says how it must end: `OK`, `FAILS` or `MAY_FAIL`.
"""

from collections.abc import Iterable, Mapping

from flashpatch.patches.fp8.refit.name_order import NameOrder

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
    ) -> None:
        self.layers, self.required, self.deferred = dict(layers), frozenset(required), frozenset(deferred)
        self.atomic, self.partial = atomic, partial
        self.served: list[Policy] = [dict(first)]
        self.version = 0
        self.is_open = self.session = self.left_out = self.broken = self.discarded = False
        self.came: dict[str, int | None] = {}
        self.names = NameOrder()  # has tests of its own
        self._anew = self._placed = self._named = False
        self._call = 0
        self._commits: list[Policy] = []  # what the call under way commits if it succeeds

    @property
    def serves(self) -> bool:
        """Whether the model must answer now; where not, it must refuse."""
        if self.atomic == "model":
            return not self.discarded
        return not self.is_open and not self.broken

    @property
    def complete(self) -> bool:
        """Whether the open update has brought everything."""
        return self.required <= self.came.keys()

    @property
    def hopeless(self) -> bool:
        """Whether no update can be opened: there is nothing that atomic='model' could fall back to."""
        return self.discarded and self.atomic == "model"

    def begin(self) -> str:
        """An update is opened by name."""
        if self.hopeless:
            return FAILS
        self._open(session=True)
        return OK

    def load(self, items: Iterable[tuple[str, int | None]], partial: bool | None = None) -> str:
        """A bucket comes; None in place of a seed: NaN."""
        if self.hopeless:
            return FAILS
        if not self.is_open or self._anew:
            self._open(session=False)
        self._call += 1
        outcome, completed, reopened = OK, set(), set()
        placed = {layer for layer in set(self.layers.values()) - self.deferred if self._has_come(layer)}
        for name, seed in items:
            layer, call = self.layers[name], self.names.came.get(name)
            if call == self._call or layer in completed:
                outcome = MAY_FAIL  # twice in one call, or too late for a new start: refused, or the later one counts
            if self.session and layer in placed - reopened:
                reopened.add(layer)
                for other in self._of(layer):
                    del self.came[other]
            elif not self.session and self.names.ends(name, self._call):
                self._restart(name)
            self.names.add(name, self._call)
            self.came[name] = seed
            if self._has_come(layer) and layer not in self.deferred:
                completed.add(layer)
                at_once = {self.names.came[other] for other in self._of(layer)} == {self._call}
                self._placed |= at_once
                if None in self._of(layer).values() and at_once:
                    return FAILS
        completed = {layer for layer in completed if self._has_come(layer)}
        self._placed |= bool(completed)
        if any(None in self._of(layer).values() for layer in completed):
            return FAILS
        self.left_out |= bool(partial)
        if partial and not self.session:
            ending = self.finish(None)
            outcome = outcome if ending == OK else ending
        return outcome

    def finish(self, partial: bool | None, named: bool = True) -> str:
        """The open update is ended."""
        self._named = named
        if not self.is_open:
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
        return MAY_FAIL if self.broken and not self.complete else OK

    def succeeded(self) -> None:
        """The call has returned."""
        if self._commits:
            self.served, self._commits, self._anew = self._commits, [], False
            self.version += 1
            if self._named:
                self.names.learn(named=True)
            self._close()
            self.broken = self.discarded = False

    def failed(self) -> None:
        """The call has raised, and so the update is abandoned."""
        self._commits = []
        self._close()
        if self.atomic == "layer":
            self.broken = True

    def discard(self) -> None:
        """Sleep level 2."""
        self._close()
        self.names.learn(named=True)
        self.broken = self.discarded = True

    def _open(self, session: bool) -> None:
        self._note_mixture()
        self._close()
        self.names.clear(framed=self._anew)
        self.is_open, self.session, self._anew = True, session, False

    def _close(self) -> None:
        self.is_open = self.session = self.left_out = False
        self.came.clear()
        self.names.clear()
        self._placed = False

    def request(self, more: bool = False) -> str:
        """A request comes, or with ``more`` another call alone: what could end without a name does."""
        if not self.is_open or self.session:
            return OK
        if self.complete and self.names.whole(more):
            self.names.learn(named=False)
            return self.finish(False, named=False)
        self._anew |= self.names.unclear and not more
        return OK

    def _restart(self, name: str) -> None:
        """A tensor came again: what earlier calls brought was another update."""
        self._note_mixture()
        self.names.restart(name, self._call, self.complete)
        self.came = {name: self.came[name] for name in self.names.came if name in self.came}

    def _note_mixture(self) -> None:
        """The open update is dropped: layers of it may be in place."""
        if self.atomic == "layer" and self._placed:
            self.broken = True

    def _of(self, layer: str) -> dict[str, int | None]:
        return {name: seed for name, seed in self.came.items() if self.layers[name] == layer}

    def _has_come(self, layer: str) -> bool:
        needed = {name for name in self.required if self.layers[name] == layer}
        return bool(needed) and needed <= self.came.keys()
