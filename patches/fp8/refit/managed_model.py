"""Update one model's weights as a transaction.

`ManagedModel` follows a model from its construction. The first load shows which (parameter, shard) pairs this
rank expects. From then on every call of ``model.load_weights`` is part of an update: it opens one if none is
open and loads into staged tensors. `finish` commits it.

States: ``loading`` (before the first load is over), ``ready``, ``open``, ``broken`` (a failed or incomplete
update has left layers of several policies: nothing may be generated until a complete update).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.precision.quantize_on_load import Rounding
from flashpatch.patches.fp8.precision.readings import Readings
from flashpatch.patches.fp8.refit import checksum, part_loads, pristine_params
from flashpatch.patches.fp8.refit.coverage import Coverage
from flashpatch.patches.fp8.refit.errors import ASLEEP, BUSY, PATCH, update_error
from flashpatch.patches.fp8.refit.layer import Layer
from flashpatch.patches.fp8.refit.layer_groups import group_layers, layers_and_parents, release_removed
from flashpatch.patches.fp8.refit.layer_state import LayerState, held_tensors
from flashpatch.patches.fp8.refit.loader_adapter import LoaderAdapter
from flashpatch.patches.fp8.refit.model_hooks import ModelHooks
from flashpatch.patches.fp8.refit.policy import Policy, listed
from flashpatch.patches.fp8.refit.staged_update import StagedUpdate
from flashpatch.patches.fp8.refit.turns import Turns
from flashpatch.patches.fp8.refit.update_events import UpdateEvents
from flashpatch.patches.fp8.refit.wide_weights import WideWeights
from flashpatch.patches.fp8.refit.write_tracker import NamedWeights, WriteLog, WriteTracker

_changes = itertools.count(1)  # of state, of all models: no number comes twice


class ManagedModel:
    """One model whose weights can be updated in place.

    Args:
        model: the model, just constructed, nothing loaded.
        adapter: the engine around it.
        options: the family's options: ``atomic``, ``partial``, ``in_flight``.
        rounding: rounds what comes into 8-bit parameters; None if nothing is.

    Attributes:
        state: see above.
        version: number of the last committed update.
        changes: another number after every change of state.
        error: why the weights are broken.
        readings: what is asked about the tensors that come, and the errors with which they were rounded.
        wide: which weights it holds in float32.
        turns: keep steps and updates apart.
        inside_load: ``model.load_weights`` is running.
        asleep: the engine has taken the memory of the weights away for now: no update begins, none is committed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        adapter: LoaderAdapter,
        options: Mapping[str, Any],
        rounding: Rounding | None = None,
    ) -> None:
        self.adapter = adapter
        self.rounding = rounding
        self.readings = Readings() if rounding is None else rounding.readings
        self.wide = WideWeights(rounding)
        self.options = options
        self.version = 0
        self.changes = 0
        self.state = "loading"
        self.error = ""
        self.asleep = False
        self.turns = Turns()
        self._events = UpdateEvents(adapter.role)
        self.inside_load = False
        self._constants: list[weakref.ref[torch.Tensor]] = []
        self._anew = False  # whether the next call begins another update
        self._left_out = False  # whether the sender of the open update allows layers to be left out
        self._model = model
        part_loads.install(model, self)
        self._hooks = ModelHooks(model, adapter.deferred)
        self._asked = False  # whether load_weights was called without weights, to see what else it does
        self._unsupported = ""  # why this model cannot be updated, found at its construction
        self.layers: list[Layer] = []
        try:
            self.layers = group_layers(
                model, adapter.device, adapter.deferred, adapter.processes, adapter.borrows
            )
        except PatchError as error:
            self._unsupported = error.problem
        self._layer_state = LayerState(
            [layer.modules for layer in self.layers], layers_and_parents(model, self.layers)
        )
        for layer in self.layers:
            layer.record_pristine_state(self._layer_state)
        self._update = StagedUpdate(
            model, self.layers, self._layer_state, adapter, options, self.readings, self.wide
        )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "state":
            super().__setattr__("changes", next(_changes))

    def load(self, original: Callable[..., Any], weights: Iterable, **kwargs: Any) -> Any:
        """Stand in for ``model.load_weights(weights)``: one bucket of an update, or the first load."""
        with self._alone():
            self.inside_load = True
            self._hooks.phase = "first" if self.state == "loading" else "bucket"
            try:
                if self.rounding is not None:
                    weights = self.rounding.prepared(weights, first=self.state == "loading")
                load = self._first_load if self.state == "loading" else self._load_bucket
                return load(original, NamedWeights(weights), **kwargs)
            finally:
                self.inside_load = False
                self._hooks.phase = "first" if self.state == "loading" else "commit"

    def remove_hooks(self) -> None:
        """Give the model its own post-processing back, and its parts their ``load_weights``."""
        self._hooks.remove()
        part_loads.remove(self._model)

    def end_first_load(self) -> None:
        """Note that the first load and its post-processing are over; nothing if that has been done."""
        if self.state != "loading":
            return
        learned = [one.expected for layer in self.layers for one in layer.params if one.expected is not None]
        if learned and not any(expected.covered for expected in learned):
            self._unsupported = "its loader writes where it cannot be followed, in other threads perhaps"
        if self._hooks.deleted:
            self._unsupported = f"post-processing deletes {listed(sorted(self._hooks.deleted))}"
        self._layer_state.find_shared([layer.modules for layer in self.layers])
        for layer in self.layers:
            layer.learn_derived(self._layer_state)
        self._update.joined.note(self.layers)
        pristine = (tensor for layer in self.layers for tensor in layer.pristine.tensors())
        self._hooks.phase = "commit"
        self._constants = [weakref.ref(tensor) for tensor in (*held_tensors(self._model), *pristine)]
        self.state = "ready"

    def release_removed_layers(self) -> None:
        """Let go of layers whose modules have left the model, so that their memory is freed."""
        fixed = release_removed(self._model, self.layers)
        if fixed is not None:
            self._layer_state.set_fixed(fixed)
            self._update.joined.note(self.layers)

    def begin(self) -> None:
        """Open a fresh update, dropping what an unfinished one had staged.

        Raises:
            PatchError: this model, or this engine as it is now, cannot be updated.
        """
        with self._alone():
            self._begin(session=True)

    def finish(self, partial: bool | None = None) -> None:
        """Commit the open update; nothing if none is open.

        Args:
            partial: accept that some layers were not sent at all; None means the family's option.

        Raises:
            PatchError: something is missing; it is named.
        """
        with self._alone():
            self._finish(partial)

    def abandon(self, why: str) -> None:
        """Give up the open update as after an error in it; nothing if none is open, or one into which nothing has come."""
        with suppress(PatchError), self._alone():
            if self.state == "open" and not self._close_if_empty():
                with self._failing():
                    raise self._error(why, "Send a complete update.")

    def close_if_empty(self) -> bool:
        """Close an open update that has written nothing; return whether there was one."""
        with self._alone():
            return self._close_if_empty()

    def commit_if_complete(self, more: bool = False) -> None:
        """Commit an update that nobody opened by name, if it is complete; ``more``: no step follows, so tensors may."""
        with nullcontext() if self.inside_load else self.turns.step:
            waits = self.state == "open" and not (self._update.session or self.inside_load or self.asleep)
            waits = waits and not (more and any(layer.waits for layer in self.layers))
            complete = waits and self._update.names.whole(more) and not self._update.missing(partial=False)
            if self.adapter.consensus.everyone_ready(complete):
                with self._alone():
                    self._finish(partial=False, named=False)

    def expect_begin(self) -> None:
        """Let the next tensor begin an update, if a request shows that an unclear one was sent."""
        waits = self.state == "open" and not (self._update.session or self.asleep)
        self._anew |= waits and self._update.names.unclear

    def mark_discarded(self, preserved: Collection[str] = (), by: str = "sleep level 2") -> None:
        """Refuse generation until a complete update: the weights are gone, but for layers whose parameters are ``preserved``."""
        self._update.drop()
        self._update.names.learn(named=True)
        self._update.discarded = True
        named = self._model.named_parameters() if preserved else ()
        self._update.preserve(tensor for name, tensor in named if name in preserved)
        self.state = "broken"
        self.error = f"the weights were discarded ({by}) and no complete update has come since"

    def brought(self) -> list[torch.Tensor]:
        """Return the live parameters that share no memory with any that no checkpoint brings: an update brings them back."""
        left_out = {tensor.untyped_storage()._cdata for tensor in self.never_loaded()}
        return [one for one in self._model.parameters() if one.untyped_storage()._cdata not in left_out]

    def never_loaded(self) -> list[torch.Tensor]:
        """Return the live parameters that no checkpoint brings: no update brings them back either."""
        params = (param for layer in self.layers for param in layer.params if not param.is_buffer)
        unloaded = (param.live() for param in params if param.expected is not None and not param.required)
        return [tensor for tensor in unloaded if tensor is not None]

    def constants(self) -> list[torch.Tensor]:
        """Return the tensors, still alive, that modules held beside parameters and buffers at and before first load."""
        return [tensor for reference in self._constants if (tensor := reference()) is not None]

    def tensors(self) -> list[torch.Tensor]:
        """Return all of `parameters`, buffers and `constants`."""
        return [*self._model.parameters(), *self._model.buffers(), *self.constants()]

    def checksum(self) -> str:
        """Return a checksum of the live weights; see `checksum.of_model`."""
        return checksum.of_model(self._model, self.adapter.deferred, self.constants())

    def policy(self) -> Policy:
        """Return state and version, for the scheduler."""
        is_open = self.state == "open"
        doubt = self._update.names.doubt if is_open and not self._update.session else ""
        missing = self._update.missing(self._allows_partial(None)) if is_open and not doubt else []
        state = "broken" if is_open and self._update.mixed else self.state
        failed = "" if is_open and self._update.session else self.error  # begun anew by name
        return Policy(self.adapter.role, state, self.version, listed(missing), doubt or failed)

    @property
    def may_generate(self) -> bool:
        """Whether the live weights are one whole policy."""
        if self.inside_load or self._update.mixed or self._update.discarded:
            return False
        return self.state == "ready" or (self.state == "open" and self.options["atomic"] == "model")

    def _first_load(self, original: Callable, names: NamedWeights, **kwargs: Any) -> Any:
        """Run the engine's own first load and record what it writes."""
        params = [param for layer in self.layers for param in layer.params]
        held = {id(param): param.live() for param in params}
        for param in params:
            param.expected = param.expected or Coverage(param.shape, param.stride, param.offset)
        table = pristine_params.storage_table((param, held[id(param)]) for param in params)
        with WriteTracker(table, lambda param, view, _: param.expected.add(view, names.current)):
            result = self._watched_load(original, names, **kwargs)
        self.readings.read()
        pristine_params.refuse_lost_writes(params, self.adapter.kept, type(self._model).__name__)
        for layer in self.layers:
            layer.note_loaded(self._layer_state, held)
        return result

    def _watched_load(self, original: Callable, weights: Iterable, **kwargs: Any) -> Any:
        """Load, and learn whether ``load_weights`` derives state of its own, which an update could not follow."""
        with self._hooks.watch_load() as derived:
            result = original(weights, **kwargs)
        if derived:
            kind = type(self._model).__name__
            self._unsupported = f"load_weights of {kind} derives {listed(derived)} by itself"
        return result

    def _load_bucket(
        self, original: Callable, names: NamedWeights, partial: bool | None = None, **kwargs: Any
    ) -> Any:
        if not self._asked:  # the first load may have been of dummy weights
            self._asked = True
            with torch.no_grad(), suppress(Exception), WriteLog(self.tensors()) as log:
                self._watched_load(original, iter(()), **kwargs)
            log.undo()
        ended = self.adapter.consensus.failure() if self.state == "open" else None
        if ended is not None and (self._update.session or ended[1]):
            with self._failing(names):
                raise self._error(ended[0], "Begin again, with a complete update.")
        if self.state != "open" or ended is not None or self._anew:
            self._begin(session=False)
        with self._failing(names), torch.no_grad(), self._events.loading(), self._update.in_order():
            result = self._update.load(original, names, self.constants, **kwargs)
        self._left_out |= bool(partial)
        if not self._update.session and self.adapter.consensus.update is None:
            self._close_if_empty()  # a tied tensor that is sent again after the commit is no update
        if partial and not self._update.session:
            self._finish()
        return result

    def _begin(self, session: bool) -> None:
        self.adapter.consensus.begin()
        if (problem := self._objection()) is not None:
            self.adapter.consensus.announce(problem.problem)
            self._events.refused(problem.problem)
            raise problem
        self._update.note_mixture()
        self._update.drop()
        self.release_removed_layers()
        self._update.names.clear(framed=self._anew)
        self._update.session, self._left_out, self._anew = session, False, False
        self.state = "open"
        self._events.opened()

    def _objection(self) -> PatchError | None:
        """Return why no update may be opened now, or None."""
        reason = self._unsupported or self.adapter.refusal()
        if reason:
            return self._error(
                f"weights of this engine cannot be updated: {reason}", "Open a new engine on them."
            )
        if self.asleep:
            return self._error(*ASLEEP)
        if self.options["in_flight"] == "refuse" and self.adapter.busy():
            return self._error(*BUSY)
        if self._update.discarded and self.options["atomic"] == "model":
            return self._error(
                "sleep level 2 discarded the weights, so atomic='model' has nothing to fall back to",
                "Use atomic='layer' for the update after a level 2 sleep.",
            )
        return None

    def _finish(self, partial: bool | None = None, named: bool = True) -> None:
        if self.state == "broken" and self.error:
            raise self._error(self.error, "Send a complete update.")
        if self.state != "open":
            return
        if self._allows_partial(partial) and self._close_if_empty():
            return
        with self._failing(), torch.no_grad(), self._events.committing(), self._update.in_order():
            self._update.commit(self._update.missing(self._allows_partial(partial)), self._hooks.run)
        self._update.names.learn(named)
        self._update.drop()
        self._update.discarded = self._update.mixed = False
        self._update.preserve(())
        self.version = self.adapter.consensus.update or self.version + 1
        self.state, self.error, self._anew = "ready", "", False
        self._events.committed(self.version)

    def _close_if_empty(self) -> bool:
        empty = self.state == "open" and self._update.empty
        if empty:
            self._update.drop()
            self._events.closed()
            if self._update.mixed and not self.error:
                self.error = "an update was given up after some of its layers were in place"
            self.state = "broken" if self.error else "ready"
        return empty

    def _allows_partial(self, partial: bool | None) -> bool:
        return (self._left_out or self.options["partial"]) if partial is None else partial

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if (refusal := self.turns.refusal(reads=self.inside_load)) is not None:
            raise self._error(*refusal)
        with self.turns.update(), self.adapter.around():
            if self.asleep and self.state == "open":  # it stays so
                raise self._error(*ASLEEP)
            yield

    @contextmanager
    def _failing(self, names: NamedWeights | None = None) -> Iterator[None]:
        """Abandon the update at any exception within, and if the policy has requests that began since it was opened."""
        update = self._update
        try:
            met = self.options["in_flight"] == "refuse" and self.adapter.busy()
            if met and self.adapter.role == "target":  # a drafter's weights mix nothing
                raise self._error(*BUSY)
            yield
        except BaseException as error:
            known_to_all, update.verdict = error is update.verdict, None
            update.note_mixture()
            update.drop()
            at = f" at {names.current}" if names is not None and names.current else ""
            said = f"{type(error).__name__}: {error}".removesuffix(": ") + at
            if self.options["atomic"] == "layer" or update.mixed:
                problem = error.problem if isinstance(error, PatchError) else said
                self.state, self.error = "broken", f"the last update failed: {problem}"
                after = "generation is refused until a complete update"
            else:
                self.state, after = "ready", "the old policy stays in place, unchanged"
            error.add_note(f"[flashpatch: {PATCH}] weight update abandoned{at}; {after}.")
            self._events.abandoned(error, self.state)
            if not known_to_all:
                self.adapter.consensus.announce(said)
            raise

    def _error(self, problem: str, advice: str) -> PatchError:
        return update_error(problem, advice, type(self._model).__name__)
