"""Update one model's weights as a transaction: what every door calls.

`ManagedModel` follows a model from its construction. The first load shows which (parameter, shard) pairs this
rank expects. From then on every call of ``model.load_weights`` is part of an update: it opens one if none is
open and loads into staged tensors. `finish` commits it.

States: ``loading`` (before the first load is over), ``ready``, ``open``, ``broken`` (nothing may be generated until a
complete update: a failed or incomplete one has left layers of several policies, or what came was no update)."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from flashpatch.errors import PatchError
from flashpatch.patches._shared.checkpoint_shapes import shapes
from flashpatch.patches.fp8.precision.quantize_on_load import Rounding
from flashpatch.patches.fp8.precision.readings import Readings
from flashpatch.patches.fp8.update import events, tensors
from flashpatch.patches.fp8.update.checks import WideWeights
from flashpatch.patches.fp8.update.events import Policy, UpdateEvents, listed, update_error
from flashpatch.patches.fp8.update.hooks import ModelHooks
from flashpatch.patches.fp8.update.layer import Layer, find_lent, group_layers, layers_and_parents
from flashpatch.patches.fp8.update.process import LayerState, held_tensors
from flashpatch.patches.fp8.update.ranks import Consensus, SingleRank
from flashpatch.patches.fp8.update.update import Update

logger = logging.getLogger("flashpatch.fp8")


class Turns:
    """The turns of one model; within ``step`` no update goes on in another thread: a step computes, or decides what to."""

    def __init__(self) -> None:
        self.step = threading.RLock()
        self._updating: int | None = None  # the thread of the call of an update that is under way

    def refusal(self, reads: bool) -> tuple[str, str] | None:
        """Return why no call of an update may begin now, with what to do about it; None if one may, in its turn.

        Args:
            reads: the call that is under way reads what a sender hands over, which another one may never wait for."""
        if reads or self._updating == threading.get_ident():
            return "another update is loading into this model", "Send one update at a time."
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, which would keep the update", "Send it after the capture."
        return None

    @contextmanager
    def update(self) -> Iterator[None]:
        """Within, no step and no other call of an update goes on in another thread."""
        with self.step:
            self._updating = threading.get_ident()
            try:
                yield
            finally:
                self._updating = None


class LoaderAdapter:
    """Access to an engine's weight loader and requests. An engine overrides what differs there.

    Args:
        device: where the weights live.
        role: of the model in its engine, ``target`` or ``drafter``.

    Attributes:
        stands_for: folder of the checkpoint that the engine's dummy weights stand for; empty if it was opened on weights.
        consensus: agreement among the ranks that hold parts of this model and process it together."""

    def __init__(self, device: torch.device, role: str = "target") -> None:
        self.device, self.role, self.stands_for = device, role, ""
        self.consensus = self.make_consensus(role)

    def make_consensus(self, name: str) -> Consensus:
        """Make an agreement of the model's ranks about what has this name."""
        return SingleRank()

    def process(self, module: torch.nn.Module) -> None:
        """Post-process one module as the engine's loader does."""
        raise NotImplementedError

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shapes of the checkpoint that dummy weights stand for, by name; empty if its files are not at hand."""
        return shapes(Path(self.stands_for)) if self.stands_for else {}

    def lenders(self) -> Iterable[ManagedModel]:
        """Return the models whose tensors this one may have in use: a drafter's targets."""
        return ()

    def deferred(self, module: torch.nn.Module) -> bool:
        """Return whether a module is processed after all others."""
        return False

    def processes(self, module: torch.nn.Module) -> bool:
        """Return whether `process` does anything to a module, asked when the model has just been constructed."""
        return True

    def borrows(self, module: torch.nn.Module) -> bool:
        """Return whether a handle that `process` makes may point into the module's tensors, which then live as long."""
        return True

    def context(self) -> AbstractContextManager[None]:
        """Enter around post-processing: default dtype, engine configuration."""
        return nullcontext()

    def around(self) -> AbstractContextManager[None]:
        """Enter around each call of an update: shows loaders the modules that they know."""
        return nullcontext()

    def refusal(self) -> str | None:
        """Return why this engine cannot be updated at all, or None."""
        return None

    def busy(self) -> bool:
        """Return whether requests are running."""
        return False

    def quantized_cache(self) -> bool:
        """Return whether the KV cache holds values that were rounded with scales of the model."""
        return False

    def kept(self, module: torch.nn.Module) -> set[str]:
        """Return the names of a module's parameters for which the engine keeps what came, until all of the module has."""
        return set()

    def captured(self) -> bool:
        """Return whether whole forwards are captured as graphs, in which numbers of Python are constants."""
        return False

    def compiled(self) -> bool:
        """Return whether parts of forwards are graphs or compiled code, which go on with the tensors they were made with."""
        return False


LOAD = "load_weights"


class PartLoad:
    """Stand in for ``load_weights`` of one part of a managed model.

    It is no function: a walk over a layer's containers stops at FlashPatch's own objects."""

    def __init__(self, managed: ManagedModel, path: str, original: Callable[..., Any]) -> None:
        self._managed, self._prefix, self._original = managed, f"{path}.", original

    def __call__(self, weights: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights, named as the part names them: as a piece of a load under way, or as a bucket of an update."""
        managed = self._managed
        if managed.inside_load:
            return self._original(weights, *args, **kwargs)

        # two parts have tensors of one name, which the update must tell apart
        whole = ((self._prefix + name, tensor) for name, tensor in weights)

        def load(weights: Any, **kwargs: Any) -> Any:
            own = ((name.removeprefix(self._prefix), tensor) for name, tensor in weights)
            result = self._original(own, *args, **kwargs)
            # a generator loads when it is read
            return list(result) if isinstance(result, Iterator) else result

        result = managed.load(load, whole, **kwargs)
        events.note(managed)
        return result


def install_part_loads(model: torch.nn.Module, managed: ManagedModel) -> None:
    """Let every part of ``model`` that has ``load_weights`` load through ``managed``."""
    for path, module in _parts(model):
        module.load_weights = PartLoad(managed, path, module.load_weights)


def remove_part_loads(model: torch.nn.Module) -> None:
    """Give the parts their own ``load_weights`` back."""
    for _, module in _parts(model):
        if isinstance(vars(module).get(LOAD), PartLoad):
            del vars(module)[LOAD]


def _parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((path, one) for path, one in model.named_modules() if path and callable(getattr(one, LOAD, None)))


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
        changes: another number after every change of state; closed: that of the last update that became ready.
        error: why no request may be answered until a whole update has come; empty if one may.
        readings: what is asked about the tensors that come.
        wide: which weights it holds in float32.
        boundaries: which tensors make the open update.
        turns: keep steps and updates apart.
        inside_load: ``model.load_weights`` is running.
        asleep: the engine has taken the memory of the weights away for now: no update begins, none is committed."""

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
        self.changes = self.closed = 0
        self.state = "loading"
        self.error = ""
        self.asleep = False
        self.turns = Turns()
        self._events = UpdateEvents(adapter.role)
        self.inside_load = False
        self._constants: list[weakref.ref[torch.Tensor]] = []
        self._left_out = False  # whether the sender of the open update allows layers to be left out
        self._model = model
        install_part_loads(model, self)
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
        self._update = Update(
            model, self.layers, self._layer_state, adapter, options, self.readings, self.wide
        )
        self.boundaries = self._update.boundaries

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state":
            if (value, vars(self).get("state")) == ("ready", "open"):
                super().__setattr__("closed", self.changes)
            super().__setattr__("changes", next(_changes))
        super().__setattr__(name, value)

    def load(self, original: Callable[..., Any], weights: Iterable, **kwargs: Any) -> Any:
        """Stand in for ``model.load_weights(weights)``: one bucket of an update, or the first load."""
        with self._alone():
            self.inside_load = True
            self._hooks.phase = "first" if self.state == "loading" else "bucket"
            try:
                if self.rounding is not None:
                    weights = self.rounding.prepared(weights, first=self.state == "loading")
                load = self._first_load if self.state == "loading" else self._load_bucket
                return load(original, tensors.NamedWeights(weights), **kwargs)
            finally:
                self.inside_load = False
                self._hooks.phase = "first" if self.state == "loading" else "commit"

    def remove_hooks(self) -> None:
        """Give the model its own post-processing back, and its parts their ``load_weights``."""
        self._hooks.remove()
        remove_part_loads(self._model)

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
        self._update.joined.find(self.layers)
        pristine = (tensor for layer in self.layers for tensor in layer.pristine.tensors())
        self._hooks.phase = "commit"
        self._hooks.engine.note()
        self._constants = [weakref.ref(tensor) for tensor in (*held_tensors(self._model), *pristine)]
        self.state = "ready"
        events.note(self)

    def find_lent_layers(self) -> None:
        """Let go of layers whose modules have left the model, so that their memory is freed; find those that are lent."""
        fixed = find_lent(
            self._model, self.layers, [layer for one in self.adapter.lenders() for layer in one.layers]
        )
        if fixed is not None:
            self._layer_state.set_fixed(fixed)
            self._update.joined.find(self.layers)
            self._hooks.engine.forget_gone()

    def begin(self) -> None:
        """Open an update by name, dropping what an unfinished one had staged.

        Raises:
            PatchError: this model, or this engine as it is now, cannot be updated."""
        if self._objection() is None:
            with suppress(Exception):  # told as the error of its update
                self.after_call()
        with self._alone():
            self._begin(named=True)

    def finish(self, partial: bool | None = None) -> None:
        """End an update by name: commit it; nothing if none is open.

        Args:
            partial: accept that some layers were not sent at all; None means the family's option.

        Raises:
            PatchError: something is missing; it is named."""
        with self._alone():
            self._finish(partial, by_name=True)

    def has_come(self, name: str) -> bool:
        """Return whether the open update has brought a tensor of this name."""
        return self.state == "open" and name in self._update.boundaries.came

    def abandon(self, why: str) -> None:
        """Give up the open update as after an error in it; nothing if none is open, or one into which nothing has come."""
        with suppress(PatchError), self._alone(asleep=True):
            if self.state == "open" and not self._close_if_empty():
                self._fail(self._error(why, "Send a complete update."), None)
            self._update.boundaries.rest = False

    def close_if_empty(self) -> bool:
        """Close an open update that has written nothing; return whether there was one."""
        with self._alone(asleep=True):
            return self._close_if_empty()

    def after_call(self) -> None:
        """Commit an update that nobody opened by name if one call has brought all of it."""
        self._settle(request=False)

    def before_request(self) -> None:
        """Commit an update that nobody opened by name if all of it has come, in one call or several."""
        self._settle(request=True)
        update = self._update
        if self.state == "open" and update.boundaries.named and self.may_generate and update.whole_unsaid():
            logger.warning(
                "all of a new policy has come, and who opened its update has not ended it: until then the old policy answers"
            )

    def mark_discarded(self, preserved: Collection[str] = (), by: str = "sleep level 2") -> None:
        """Refuse generation until a complete update: the weights are gone, but for layers whose parameters are ``preserved``."""
        self._update.boundaries.fail(self.state == "open")
        self._update.drop()
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
        """Return a checksum of the live weights; see `checksum_of`."""
        return tensors.checksum_of(self._model, self.adapter.deferred, self.constants())

    def policy(self) -> Policy:
        """Return state and version, for the scheduler."""
        missing = self._missing(None, self._update.boundaries.named) if self.state == "open" else []
        stale = self.options["atomic"] == "model" and not self.may_generate
        state = "broken" if self.state == "open" and (stale or self._update.mixed) else self.state
        anew = self.state == "open" and self._update.boundaries.named
        error = "" if anew else self.error
        if self.state == "open" and not (missing or error or self.may_generate):
            error = "an update is open, its sender has not ended it"
        return Policy(self.adapter.role, state, self.version, listed(missing), error)

    @property
    def may_generate(self) -> bool:
        """Whether the live weights are one whole policy, the last one that was sent as far as that is known."""
        update = self._update
        if self.inside_load or self.error or update.mixed or update.discarded:
            return False
        if self.state == "open":
            return self.options["atomic"] == "model" and update.boundaries.named
        return self.state == "ready"

    def _first_load(self, original: Callable, names: tensors.NamedWeights, **kwargs: Any) -> Any:
        """Run the engine's own first load and record what it writes."""
        params = [param for layer in self.layers for param in layer.params]
        held = {id(param): param.live() for param in params}
        for param in params:
            param.expected = param.expected or tensors.Coverage(param.shape, param.stride, param.offset)
        table = tensors.storage_table((param, held[id(param)]) for param in params)

        def on_write(param: tensors.PristineParam, view: torch.Tensor, source: torch.Tensor | None) -> None:
            param.expected.add(view, names.current)
            if source is not None:
                param.filled = names.fills(param, source, table)

        with tensors.WriteTracker(table, on_write):
            result = self._watched_load(original, self._update.first_load(names), False, **kwargs)
        self.readings.check()
        tensors.refuse_lost_writes(params, self.adapter.kept, type(self._model).__name__)
        self._layer_state.find_shared([layer.modules for layer in self.layers])
        for layer in self.layers:
            layer.note_loaded(self._layer_state, held)
        return result

    def _derives(self, container: Any, key: str) -> bool:
        place = id(container), ""  # few layers have it: this is asked of all
        return any(
            [key in one.derived.keys(container) for one in self.layers if place in one.derived.by_place]
        )

    def _watched_load(self, original: Callable, weights: Iterable, probe: bool, **kwargs: Any) -> Any:
        """Load, and learn whether ``load_weights`` derives state of its own, which an update could not follow."""
        with self._hooks.watch_load(probe) as derived:
            result = original(weights, **kwargs)
        if derived:
            kind = type(self._model).__name__
            self._unsupported = f"load_weights of {kind} derives {listed(derived)} by itself"
        return result

    def _load_bucket(
        self, original: Callable, names: tensors.NamedWeights, partial: bool | None = None, **kwargs: Any
    ) -> Any:
        if not (self._asked or self._unsupported):  # the first load may have been of dummy weights
            self._asked = True
            log = tensors.WriteLog(self.tensors())
            with torch.no_grad(), suppress(Exception), log, self._hooks.engine.kept(self._derives):
                self._watched_load(original, iter(()), True, **kwargs)
            log.undo()
            if self._unsupported and self.state == "open":
                with self._failing(names):
                    raise self._objection()
        update = self._update
        ended = self.adapter.consensus.failure() if self.state == "open" else None
        if ended is not None and (update.boundaries.named or ended[1]):
            with self._failing(names):
                raise self._error(ended[0], "Begin again, with a complete update.")
        if self.state != "open" or ended is not None:
            self._begin(named=False)
        elif partial and not update.boundaries.named:
            with self._failing(names):
                raise self._error(
                    "partial=True came after calls that nobody has named", "Name begin and end."
                )
        with self._failing(names), torch.no_grad(), self._events.loading(), update.in_order():
            with self._hooks.engine.kept(self._derives):
                result = update.load(original, names, self.constants, **kwargs)
            self._left_out |= bool(partial)
            boundaries = update.boundaries
            begun = any([layer.came.processed for layer in self.layers])
            idle = update.empty and (boundaries.doubt or not begun)
            if not boundaries.named and (
                boundaries.repeats or (idle and not self.adapter.consensus.stages)
            ):  # what is idle on one stage may be something on another, which then has the update open
                self._close()  # what is in place already, such as a call that is sent again after the commit
            elif not (partial or update.boundaries.named):
                update.check_call()
        if partial and self.state == "open" and not update.boundaries.named:
            self._finish(by_name=True)
        return result

    def _settle(self, request: bool) -> None:
        """Commit an update that nobody opened by name, if it is whole; ``request``: several calls may have brought it."""
        update = self._update
        with nullcontext() if self.inside_load else self.turns.step:
            waits = self.state == "open" and not (update.boundaries.named or self.inside_load or self.asleep)
            ended = update.boundaries.one_call or (request and not update.boundaries.ends)
            complete = waits and ended and update.whole
            if self.adapter.consensus.everyone_ready(complete):
                with self._alone():
                    update.doubted = True  # until it is committed: an error reaches no call of its sender
                    self._finish(partial=False)

    def _begin(self, named: bool) -> None:
        self.adapter.consensus.begin()
        if (problem := self._objection()) is not None:
            self.adapter.consensus.announce(problem.problem)
            self._events.refused(problem.problem)
            raise problem
        if self.state == "open" and self._update.boundaries.given_up:
            self.error = "an update that nobody had named was given up when another one began"
            self._update.boundaries.fail()
        self._update.note_mixture()
        self._update.drop()
        self.find_lent_layers()
        self._update.boundaries.begin(named)
        self._left_out = False
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
            return self._error(*events.ASLEEP)
        if self.options["in_flight"] == "refuse" and self.adapter.busy():
            return self._error(*events.BUSY)
        if self._update.discarded and self.options["atomic"] == "model":
            return self._error(
                "sleep level 2 discarded the weights, so atomic='model' has nothing to fall back to",
                "Use atomic='layer' for the update after a level 2 sleep.",
            )
        return None

    def _finish(self, partial: bool | None = None, by_name: bool = False) -> None:
        update = self._update
        if by_name:
            update.boundaries.end_by_name(self.state == "open")
        by_name |= update.boundaries.named
        if self.state == "broken" and self.error:
            raise self._error(self.error, "Send a complete update.")
        if self.state != "open":
            return self._refuse_failed(by_name)
        if isinstance(self.adapter.consensus, SingleRank) and update.empty:
            nowhere = (
                ()
                if any(one.written or one.came.processed for one in self.layers)
                else update.boundaries.came
            )
            self._close()
            self._refuse_failed(by_name)
            if nowhere and by_name:
                what = f"nothing of what came has a place in the model: {listed([*nowhere])}"
                raise self._error(what, "Send the names of the checkpoint.")
            return
        with self._failing(), torch.no_grad(), self._events.committing(), update.in_order():
            came = update.commit(self._missing(partial, by_name), self._hooks.run, by_name)
        if not came:
            self._close()
            return self._refuse_failed(by_name)
        update.boundaries.commit(by_name)
        update.drop()
        update.discarded = update.mixed = False
        update.preserve(())
        self.version = self.adapter.consensus.update or self.version + 1
        self.error, self.state = "", "ready"
        self._events.committed(self.version)

    def _refuse_failed(self, by_name: bool) -> None:
        if by_name and self.boundaries.failed:
            raise self._error("the update had failed before its end", "Send a complete update.")

    def _close_if_empty(self) -> bool:
        empty = self.state == "open" and self._update.empty
        if empty:
            self._close()
        return empty

    def _close(self) -> None:
        """Close an update that has changed nothing."""
        self._update.note_mixture()
        self._update.drop()
        self._events.closed()
        if self._update.mixed and not self.error:
            self.error = "an update was given up after some of its layers were in place"
        self.state = "broken" if self.error else "ready"

    def _missing(self, partial: bool | None, by_name: bool) -> list[str]:
        partial = (self._left_out or self.options["partial"]) if partial is None else partial
        failed = self.error or self._update.boundaries.rest  # only a whole update ends that
        return self._update.missing(partial and not failed, by_name)

    @contextmanager
    def _alone(self, asleep: bool = False) -> Iterator[None]:
        """Within, no other call goes on; ``asleep``: it touches no live memory, so that an open update needs none."""
        if (refusal := self.turns.refusal(reads=self.inside_load)) is not None:
            raise self._error(*refusal)
        with self.turns.update(), self.adapter.around():
            if self.asleep and self.state == "open" and not asleep:  # it stays so
                raise self._error(*events.ASLEEP)
            yield

    @contextmanager
    def _failing(self, names: tensors.NamedWeights | None = None) -> Iterator[None]:
        """Abandon the update at any exception within, and if the policy has requests that began since it was opened."""
        try:
            met = self.options["in_flight"] == "refuse" and self.adapter.busy()
            if met and self.adapter.role == "target":  # a drafter's weights mix nothing
                raise self._error(*events.BUSY)
            yield
        except BaseException as error:
            self._fail(error, names)
            raise

    def _fail(self, error: BaseException, names: tensors.NamedWeights | None) -> None:
        update = self._update
        known_to_all, update.verdict = error is update.verdict, None
        doubted = update.doubted
        update.note_mixture()
        if names is not None:  # at a commit it is known, or somebody has named the end
            update.boundaries.keep_anchor()
        update.boundaries.fail(names is not None)
        update.drop()
        at = f" at {names.current}" if names is not None and names.current else ""
        said = f"{type(error).__name__}: {error}".removesuffix(": ") + at
        if self.options["atomic"] == "layer" or update.mixed or doubted or self.error:
            problem = error.problem if isinstance(error, PatchError) else said
            self.error, self.state = f"the last update failed: {problem}", "broken"
            after = "generation is refused until a complete update"
        else:
            self.state, after = "ready", "the old policy stays in place, unchanged"
        error.add_note(f"[flashpatch: {events.PATCH}] weight update abandoned{at}; {after}.")
        self._events.abandoned(error, self.state)
        if not known_to_all:
            self.adapter.consensus.announce(said)

    def _error(self, problem: str, advice: str) -> PatchError:
        return update_error(problem, advice, type(self._model).__name__)
