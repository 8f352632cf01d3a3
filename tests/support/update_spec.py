"""What an update is: the specification. Plain Python; it shares no code with the product and borrows no names from it.

A policy is a number per tensor. A sender brings tensors, `Spec` says what is due: which call ends with an error, which
requests are answered, and which number each tensor has then. Two numbers in an answer that nobody sent together: a mixture.

What makes an update
  named         all that comes between a begin and an end. A name may come again, the last value counts.
  one call      a call that brings everything. What was open before is dropped.
  anchor        calls that bring each name once, from the anchor on: the first name of the first such update. It always
                begins anew, with the same values too. The next request commits them; a request begins nothing. Before
                there is one, the first name that has come stands for it, also of an update that was given up.
  named end     a sender that names its ends alone: all since its last end, in any order. It has no anchor, and from its
                first end on no request commits several calls.
What is nothing
  a name that comes again with the value it brought, but for the anchor; after a commit, a call that begins with another
  name than the anchor and brings only what was just committed, or tensors of two names that hold it already; a session that brings nothing.
What is doubt
  a name that comes again, in another call, with another value; another name than the anchor at the beginning; while there
  is no anchor, what comes behind a session that failed and was not ended: it may be its rest. That call ends with an error, unless it brings everything, and nothing is answered until a whole update is committed.
What fails
  values or shapes that cannot be, a sender that raises, an end before all has come, two values for one tensor. The call
  ends with an error, and so does an end of which nothing has come since. "layer" answers nothing until a whole update is
  committed, "model" goes on with the old policy.
Everything
  each name of the first load. A buffer that no first load has shown (dummy weights): once committed, it belongs to every
  update; left out by a named one, it does not; until then an update without a name waits for it."""

NONE, ERROR, EITHER = "no error", "an error", "an error or none"  # due from a call
ANSWERED, REFUSED, OPEN = "answered", "refused", "answered by the old policy or refused"  # due to a request
SPOILED = "a value that cannot be"


class Spec:
    """One model. Each method is one call: it returns what is due; then `ended` is told how the call ended.

    Args:
        layers: name -> layer: what is put in place together.
        atomic: "layer" puts a layer in place as soon as it has come, "model" all of them at the commit.
        owners: name -> the name whose tensor it is too, for names that share one (ties).
        unseen: buffers that no first load has shown.
        first: the policy of the first load; None: dummy weights.

    Attributes:
        served: tensor -> number, of the policy committed last; without what is not known.
        version: how many were committed."""

    def __init__(self, layers, atomic, owners=None, unseen=(), first=0):
        self.layers, self.atomic, self.unseen = dict(layers), atomic, set(unseen)
        self.owner = {name: (owners or {}).get(name, name) for name in layers}
        self.needed = {self.owner[name] for name in layers if name not in self.unseen}
        self.served = {} if first is None else dict.fromkeys(self.owner.values(), first)
        self.version = self.calls = 0
        self.open = None  # "named", "unnamed"
        self.came = {}  # name -> (value, number of its call), in order
        self.anchor = None  # None before a call has brought a part
        self.ends = False  # a sender has named an end alone
        self.just = {}  # tensor -> number, if the last thing was a commit without begin and end
        self.asleep = self.discarded = self.doubt = self.failed = self.lost = self.rest = False
        self.touched = (
            False  # layers of an update that was dropped may be in place ("layer"), or it was in doubt
        )
        self._commit = self._effect = None

    # -- what is due ---------------------------------------------------------------------------------------

    @property
    def answers(self):
        """What is due to a request."""
        if self.asleep or self.discarded or self.doubt or self.failed or self.open == "unnamed":
            return REFUSED
        if self.open == "named":
            whole = OPEN if self.whole() else ANSWERED  # its end is due
            return whole if self.atomic == "model" else REFUSED
        return OPEN if self.touched else ANSWERED

    @property
    def hopeless(self):
        """The weights are gone and "model" has no old policy to fall back to: nothing can be sent."""
        return self.asleep or (self.discarded and self.atomic == "model")

    @property
    def in_one_call(self):
        return len({call for _, call in self.came.values()}) == 1

    def whole(self, ended=False):
        """Everything has come; ``ended``: its sender says so, or will."""
        known = ended or self.open == "named"
        waits = set() if known else {self.owner[name] for name in self.unseen}
        return self.needed | waits <= {self.owner[name] for name in self.came}

    def cannot_be(self):
        """A value is spoiled, or one tensor has two."""
        values = {(self.owner[name], value) for name, (value, _) in self.came.items()}
        return any(value == SPOILED for _, value in values) or len(dict(values)) < len(values)

    # -- calls ---------------------------------------------------------------------------------------------

    def begin(self):
        self._commit, self._effect = None, not self.hopeless
        if self.hopeless:
            return ERROR
        self._drop()
        self.open, self._cut, self.lost, self.rest = "named", False, False, False
        return NONE

    def load(self, items, raises=False):
        """A call brings (name, value) pairs; ``raises``: and then its sender, or the loader, does."""
        self._commit, self._effect = None, not self.hopeless
        if self.hopeless:
            return ERROR
        self.calls += 1
        self.open, self._ends = self.open or "unnamed", False
        twice = len({name for name, _ in items}) < len(
            items
        )  # within a call: the last counts, or it is refused
        doubt = "" if self.open == "named" else self._arrive(items)
        if self.open == "named":
            self._cut |= any(self._again(name) for name, _ in items)
            self.came |= {name: (value, self.calls) for name, value in items}
        alone = self.in_one_call and self.open == "unnamed" and self.whole()
        self._doubtful = bool(doubt) and not (alone or raises)
        if raises or self._doubtful or (alone and self.cannot_be()):
            return ERROR
        if not self.came and self.open == "unnamed":
            self.open = None
        self._commit = "one call" if alone else None
        return EITHER if twice or self.cannot_be() else NONE

    def _arrive(self, items):
        """Take what comes without a name; return why it is in doubt."""
        doubt, names = "", [name for name, _ in items]
        anchor = self.anchor or next(iter([*self.came, *(names if not self.rest else "")]), None)
        if not self.came and names[:1] not in ([], [anchor]):
            tied = {owner: self.served.get(owner) for name, owner in self.owner.items() if name != owner}
            held = tied | self.just
            if all(value == held.get(self.owner[name]) for name, value in items):
                return doubt  # what was just committed, or what another name has brought
            doubt = "another name at the beginning"
        for name, value in items:
            old, call = self.came.get(name, (None, self.calls))
            if call != self.calls and value == old and name != anchor:
                continue
            if call != self.calls:  # what earlier calls brought is no part of this
                self.came = {one: pair for one, pair in self.came.items() if pair[1] == self.calls}
                doubt = "" if name == anchor and not self.came else "it came again with another value"
            self.came[name] = value, self.calls
        return doubt

    def finish(self, partial=False):
        """An end; ``partial``: layers of which nothing came keep what they have."""
        self._commit, self._effect = None, not (self.asleep and self.open)
        if not self._effect:
            return ERROR
        if self.open != "named":
            self.anchor = None
            self.ends |= len({call for _, call in self.came.values()}) > 1
        self.rest, self._ends = False, True
        if self.lost and not self.came:
            self._effect, self.open = False, None
            return ERROR
        refused = self.answers == REFUSED and self.open is None
        if not self.came:
            sound = not (self.discarded or self.doubt or self.failed or self.touched)
            self._effect, self.open = self.open is not None, None
            return NONE if sound and not refused else EITHER
        if self.cannot_be() or not (self.whole(True) or (partial and self._left_out_whole())):
            return ERROR
        self._commit = "end" if self.open == "unnamed" else "session"
        sound = self.whole(True) or not (self.doubt or self.failed or self.touched)
        return NONE if sound and not self._cut else EITHER

    def _left_out_whole(self):
        came = {self.owner[name] for name in self.came}
        cut = {self.layers[name] for name in self.came} & {
            self.layers[name] for name in self.needed if name not in came
        }
        return not cut and not self.discarded

    def request(self):
        """A request comes."""
        self._commit, self._effect = None, True
        if self.open != "unnamed" or self.asleep or not self.whole():
            return NONE
        if self.ends and not self.in_one_call:
            return NONE
        self._commit = "request"
        return ERROR if self.cannot_be() else NONE

    def discard(self):
        """The weights are gone (sleep at level 2)."""
        self.just, self.rest = {}, self.rest or self.open == "named"
        self._drop()
        self.discarded = True

    # -- how they end --------------------------------------------------------------------------------------

    def ended(self, error):
        """The call has ended, with an error or without."""
        if error and self._effect:
            self._fail()
        elif not error and self._commit:
            self._committed(self._commit)
        if not error and self.open == "unnamed" and not self.ends:
            self.anchor = self.anchor or next(iter(self.came), None)
        self._doubtful = False

    def _again(self, name):
        """A tensor of several of a layer comes again after all of them have."""
        layer = {one for one in self.needed if self.layers[one] == self.layers[name]}
        return name in self.came and len(layer) > 1 and layer <= {self.owner[one] for one in self.came}

    _doubtful = False  # the call under way is
    _cut = False  # in this session such a tensor came: the others of its layer must come again too, or its end is an error

    def _committed(self, by):
        brought = {self.owner[name]: value for name, (value, _) in self.came.items()}
        self.served |= brought
        self.needed |= brought.keys()
        self.unseen -= self.came.keys()
        if by in ("session", "end"):
            self.served |= dict.fromkeys(self.unseen, None)  # as the model was made
            self.unseen = set()
        self.version += 1
        self.just = dict(brought) if by in ("request", "one call") else {}
        self.open, self.came = None, {}
        self.discarded = self.doubt = self.failed = self.touched = self.rest = self.lost = False

    def _fail(self):
        self.just, self.rest = {}, self.rest or (self.open == "named" and not self._ends)
        self.touched |= self._doubtful and self.cannot_be()  # one of both has ended the call
        self.doubt |= self._doubtful and not self.cannot_be()
        self.failed |= self.atomic == "layer"
        self.open, self.came, self.lost = None, {}, True

    def _drop(self):
        self.touched |= bool(self.came) and self.atomic == "layer"
        self.doubt |= bool(self.came) and self.open == "unnamed"  # its sender is not told
        self.open, self.came = None, {}
