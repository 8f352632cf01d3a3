"""The open update of one model: load what comes into staged tensors, and bring layer after layer into the running model.

Layers that are complete are queued, agreed on by the ranks, and processed: into place at once (``atomic="layer"``), or
into a plan that the commit carries out (``atomic="model"``)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flashpatch.errors import PatchError
from flashpatch.patches._shared import fingerprint, streams
from flashpatch.patches._shared.named_parameters import listed_at_once
from flashpatch.patches.fp8.precision.readings import Readings
from flashpatch.patches.fp8.update import tensors
from flashpatch.patches.fp8.update.boundaries import Boundaries, Step
from flashpatch.patches.fp8.update.checks import CachedScales, Check, JoinedLayers, TiedHead, WideWeights
from flashpatch.patches.fp8.update.events import listed, update_error
from flashpatch.patches.fp8.update.layer import Layer, check_staged, show_live, show_staged
from flashpatch.patches.fp8.update.process import LayerState, Plan, Undo

if TYPE_CHECKING:
    from flashpatch.patches.fp8.update.model import LoaderAdapter

logger = logging.getLogger("flashpatch.fp8")

#: Tensors of one call between two agreements of several ranks: bounds the memory that waits for them.
_BETWEEN = 32


class Update:
    """The open update of one model; `drop` makes it ready for the next.

    Args:
        model: the model.
        layers: its layers.
        layer_state: which Python state belongs to which layer.
        adapter: the engine around the model.
        options: the family's, of which ``atomic`` and ``in_flight`` count.
        readings: what is asked about the tensors that come.
        wide: told of every write.

    Attributes:
        boundaries: which tensors make it.
        joined: which layers share memory since the first load.
        mixed: the live layers may be of several policies, so only a complete update helps. Outlives `drop`.
        discarded: the live weights are gone (sleep level 2). Outlives `drop`.
        verdict: the error that all ranks agreed on; None while there is none.
        doubted: the last call brought what is of no update."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: list[Layer],
        layer_state: LayerState,
        adapter: LoaderAdapter,
        options: Mapping[str, Any],
        readings: Readings,
        wide: WideWeights,
    ) -> None:
        self._model = model
        # whose load_weights lists parameters
        self._loading = {model, *(one for one in model.modules() if hasattr(one, "load_weights"))}
        self._layers = layers
        self._layer_state = layer_state
        self._adapter = adapter
        self._atomic = options["atomic"]
        self._readings = readings
        self._wide = wide
        self.boundaries = Boundaries()
        self.joined = JoinedLayers(type(model).__name__)
        self._tied = TiedHead(model, layers)
        self._scales = CachedScales(layers, layer_state, adapter, options["in_flight"] == "keep")
        self._checks: list[Check] = [self.joined, self._tied, self._scales]
        # of each name that the engine was opened on or took since, and of the open update
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._came_as: dict[str, tuple[int, ...]] = {}
        self._preserved: set[Layer] = set()  # layers that outlived a sleep of level 2
        self._news = False  # whether a layer was given what it does not hold already
        self._queue: list[Layer] = []
        self._reopened: list[Layer] = []  # which earlier calls opened and this one writes to
        self._watched: tensors.WriteLog | None = None  # tensors beside parameters and buffers
        self._call = 0  # number of the load_weights call under way
        self._accessible: set[int | None] = set()  # storages known to have memory, see `WriteTracker`
        self._table: dict[int, list[tensors.PristineParam]] = {}  # storage identity -> what is staged there
        self._in_use: set[int | None] = set()  # live storages of layers that this call has completed
        self._freed: list[StorageWeakRef] = []  # what a call has let go of, whose identity its loader knows
        self._lost = False  # whether a tensor came in this call of which nothing was written
        self._stream = streams.current(adapter.device)  # on which this update began
        self._whole: bool | None = None  # see `whole`; None: it has to be found out
        self._dropped = True  # whether no load and no commit has begun since `drop`
        self.mixed = self.discarded = self.doubted = self._said = False
        self.verdict: PatchError | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing has been written yet, or only what layers hold already that share it with others."""
        return not (self._news or self._tied.missing or self._unlike_the_lender()) and not any(
            [layer.written for layer in self._layers if not layer.came.processed]
        )

    @property
    def whole(self) -> bool:
        """Whether a request may end the open update: nothing is missing."""
        if self._whole is None:
            self._whole = not self.missing(partial=False, by_name=self.boundaries.named)
        return self._whole

    def whole_unsaid(self) -> bool:
        """Return, once for an open update, whether it is whole."""
        first, self._said = not self._said, self._said or self.whole
        return first and self._said

    def in_order(self) -> AbstractContextManager[None]:
        """Work on the stream on which this update began: vLLM's packed transfer calls on two by turns."""
        return streams.on(self._stream, self._adapter.device)

    def drop(self) -> None:
        """Free everything staged and planned."""
        ended, self._stream = self._stream, streams.current(self._adapter.device)
        self._stream.wait_stream(ended)
        planned = any([layer.came.plan for layer in self._layers]) and self._adapter.device.type != "cpu"
        for one in (self._queue, self._table, self._readings, *self._checks):
            one.clear()
        self._watched, self._news, self._call, self._whole = None, False, 0, None
        self.doubted = self._said = False
        self._came_as.clear()
        for layer in () if self._dropped else self._layers:
            layer.reset()
        self._dropped = True
        if planned:  # as large as a model, and what is woken next, such as the KV cache, may need it
            torch.get_device_module(self._adapter.device).empty_cache()

    def preserve(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the layers whose parameters are all among ``tensors`` as present until the next commit."""
        kept = {id(tensor) for tensor in tensors}
        self._preserved = {layer for layer in self._layers if kept and layer.consists_of(kept)}

    def note_mixture(self) -> None:
        """Before an unfinished update is dropped: note that layers of it may be in place already."""
        self.mixed |= self._atomic == "layer" and self._news and not self.boundaries.repeats

    def missing(self, partial: bool, by_name: bool) -> list[str]:
        """Return names that a complete update would still have to bring.

        Args:
            partial: layers left out whole are fine.
            by_name: its sender says where it ends, so that a buffer of which nothing is known need not come."""
        partial = partial and not self.discarded and not self.mixed
        present = self._preserved.union(
            self.joined.followers(self._layers), (layer for layer in self._layers if layer.lent)
        )
        waiting = [
            layer
            for layer in self._layers
            if not layer.came.processed and (layer.written or layer not in present)
        ]
        missing = [
            name for layer in waiting if layer.written or not partial for name in layer.missing(by_name)
        ]
        missing += [] if by_name else self._filled_in()
        return self._tied.missing + missing + [f"a part of {one.name} on another rank" for one in self._queue]

    def _filled_in(self) -> list[str]:
        """Return what a loader has filled in, but not at the first load: the checkpoint's tensor may come still."""
        filled = [one for layer in self._layers if layer.came.filled for one in layer.params]
        return [
            one.name
            for one in filled
            if one.name in one.layer.came.filled
            and not one.filled
            and (one.expected is not None or any(name.endswith(one.name) for name in self._shapes))
        ]

    # -- loading -----------------------------------------------------------------------------------------

    def first_load(self, names: tensors.NamedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors of the first load on, and note the shape of each."""
        for name, tensor in names:
            self._shapes[name] = _squeezed(tensor.shape)
            yield name, tensor

    def load(
        self, original: Callable, names: tensors.NamedWeights, constants: Callable[[], list], **kwargs: Any
    ) -> Any:
        """Run the model's ``load_weights`` on staged tensors; process the layers that this call completes.

        Args:
            original: the model's ``load_weights``.
            names: the weights.
            constants: returns tensors beside parameters and buffers that must not be written either.

        Raises:
            PatchError: what came does not fit, or is no part of an update."""
        self._call += 1
        self._lost, self._whole, self._dropped = False, None, False
        if not self._shapes:  # it was opened on dummy weights
            self._shapes = {name: _squeezed((*shape,)) for name, shape in self._adapter.shapes().items()}
        if self._watched is None:
            params = [param for layer in self._layers for param in layer.params]
            buffers = [param.live() for param in params if param.is_buffer and param.initial is None]
            self._watched = tensors.WriteLog([*constants(), *(one for one in buffers if one is not None)])
        touched: dict[Layer, None] = {}  # layers written since they were last looked at, in order
        with ExitStack() as stack:
            stack.callback(show_live, self._layers)
            stack.enter_context(listed_at_once(self._loading))
            self._stage()
            show_staged(self._layers)
            stack.enter_context(self._tracker(names, touched))
            result = original(self._pass_on(names, touched), **kwargs)
            self._queue_complete(touched)
            check_staged(self._layers, memory=self._lost)
        self._process_queue(last=True)
        self._readings.check()
        for layer in self._reopened:
            layer.came.later.clear()
        self._reopened.clear()
        return result

    def check_call(self) -> None:
        """Check, after a call of an update that nobody opened by name, that what came may be a part of one update.

        Raises:
            PatchError: it may not."""
        boundaries = self.boundaries
        if (doubt := boundaries.doubt) and not (
            boundaries.one_call and not self.missing(partial=False, by_name=True)
        ):
            self.doubted = True
            raise self._error(doubt, "Until a whole update has come no request is answered.")
        self._refuse()
        if not (boundaries.one_call and self.whole):
            boundaries.keep_anchor()

    def _stage(self) -> None:
        """Stage what is not staged yet, and note whose memory is where."""
        for freed in self._freed:
            self._table.pop(freed.cdata, None)
        self._freed.clear()
        self._in_use.clear()
        fresh = [layer for layer in self._layers if not layer.tables]
        for layer in fresh:
            layer.stage()
        self._table |= tensors.storage_table([(one, one.tensor) for layer in fresh for one in layer.params])

    def _tracker(self, names: tensors.NamedWeights, touched: dict[Layer, None]) -> tensors.WriteTracker:
        def on_access(param: tensors.PristineParam) -> None:
            if param.layer.released_in == self._call:
                twice = f"{names.current or param.name} came twice in one call"
                raise self._error(twice, "Send it once, or again in another call of an update that is named.")
            param.allocate()

        def on_write(param: tensors.PristineParam, view: torch.Tensor, source: torch.Tensor | None) -> None:
            layer = param.layer
            filled = source is not None and names.fills(param, source, self._table, self._in_use)
            if (filled or names.over) and view.numel() and param.name not in layer.came.filled:
                self._refuse_overwriting(param, view)
            if layer.came.processed:
                again = layer.came.unexpected
                self._forget(layer)  # so a tensor of it comes again in a session: this layer begins anew
                layer.came.again = again
            came = layer.came
            came.opened = came.opened or self._call
            if came.opened != self._call:
                came.later.append((param, view, names.current))
                self._reopened.append(layer)
            param.coverage.add(view, names.current)
            if filled and self._atomic == "model" and tensors.storage_identity(source) in self._in_use:
                raise self._error(
                    f"{type(self._model).__name__} filled {param.name} from a tensor in use, which holds the old policy",
                    "Set the option atomic to layer.",
                )
            if filled:
                came.filled.add(param.name)
            elif source is not None and came.filled:
                came.filled.discard(param.name)
            touched[layer] = None
            if names.wide:
                self._wide.note(names, param, source)

        self._accessible.clear()
        return tensors.WriteTracker(self._table, on_write, on_access, self._live_storages, self._accessible)

    def _refuse_overwriting(self, param: tensors.PristineParam, view: torch.Tensor) -> None:
        """Refuse what a loader fills in, or writes when it has drawn all tensors of a call, over what an earlier call has brought: it
        may be a head that this call had not."""
        came = param.layer.came
        now = {param.coverage.box(part) for one, part, _ in came.later if one is param}
        opened = came.opened not in (0, self._call)
        if came.processed or (opened and param.coverage.overlaps_any(param.coverage.box(view), but=now)):
            raise self._error(
                f"{type(self._model).__name__} wrote another tensor over {param.name}, which an earlier call had brought",
                "Send the whole update in one call.",
            )

    def _live_storages(self) -> dict[int, str]:
        """Return storage identity to name, for every parameter and buffer in use with memory of its own, and other tensors."""
        storages = dict.fromkeys(self._watched.watched, "a tensor that is no parameter")
        live = {id(module): tables for layer in self._layers for module, *tables in layer.live_tables}
        for path, module in self._model.named_modules():
            for table in live.get(id(module), (module._parameters, module._buffers)):
                for key, tensor in table.items():
                    if tensor is not None and not hasattr(tensor, "__tensor_flatten__"):
                        storages[tensor.untyped_storage()._cdata] = f"{path}.{key}"
        return storages

    def _pass_on(
        self, names: tensors.NamedWeights, touched: dict[Layer, None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        ranks, named = self._adapter.consensus.ranks, self.boundaries.named
        for number, (name, tensor) in enumerate(names, start=1):
            shape = _squeezed(tensor.shape)
            if self._shapes.get(name, shape) != shape:
                raise self._error(
                    f"{name} came as {list(tensor.shape)}, and in the checkpoint, or before, as {list(self._shapes[name])}",
                    "Send whole tensors in the shapes of the checkpoint; if what came before was wrong, open a new engine.",
                )
            step = self.boundaries.arrive(name, self._call, None if named else self._values(tensor))
            if step is Step.ANEW:
                self._restart(name)
            if step is not Step.SKIP:
                self._came_as[name] = shape
                yield name, tensor
                self._lost |= not touched
                if self._tied.exists:
                    self._tied.tensor(name, tensor, self._call)
                self._queue_complete(touched)
            # Drawing the next tensor may be a collective. So ranks meet at a number of tensors, whatever order they come in.
            if self._queue if ranks == 1 else number % _BETWEEN == 0:
                self._process_queue()

    def _values(self, tensor: torch.Tensor) -> tuple | None:
        """Tell a tensor's values from others: nobody says where this update begins and ends."""
        if not tensors.has_memory(tensor):
            return None
        with torch._C._DisableTorchDispatch():  # as `Unseen`, without a call for each tensor
            return tuple(tensor.shape), tensor.dtype, fingerprint.of(tensor)

    def _restart(self, name: str) -> None:
        """Another update has begun, to which all of this call belongs: forget what earlier calls brought."""
        logger.warning("%s came again: taking it as the start of a new update", name)
        self._adapter.consensus.begin()  # as a rank on which the last one had ended does
        self.note_mixture()
        self._news &= any(
            [one.came.processed == self._call == one.came.opened and not one.lent for one in self._layers]
        )
        for check in self._checks:
            check.forget_before(self._call)
        for layer in self._layers:
            if layer.came.opened != self._call:
                later, filled = layer.came.later, layer.came.filled
                self._forget(layer)
                layer.came.filled = filled & {param.name for param, _, _ in later}
                for param, view, written_by in later if layer.released_in != self._call else ():
                    layer.came.opened = self._call
                    param.coverage.add(view, written_by)

    def _forget(self, layer: Layer) -> None:
        layer.forget()
        self._queue = [one for one in self._queue if one is not layer]

    # -- processing --------------------------------------------------------------------------------------

    def _queue_complete(self, touched: dict[Layer, None]) -> None:
        for layer in touched:
            if layer.complete and not (layer.deferred or layer.waits or layer.came.queued):
                layer.came.queued = True
                self._queue.append(layer)
        touched.clear()

    def _process_queue(self, last: bool = False) -> None:
        """Process the layers that are complete on every rank; ``last``: at the end of a call, until all ranks are, and
        those too that an earlier call opened: until then a tensor of them may come again."""
        while self._queue or self._adapter.consensus.ranks > 1:
            queue = [layer for layer in self._queue if last or layer.came.opened == self._call]
            if not queue and not last and self._adapter.consensus.ranks == 1:
                break
            with tensors.Unseen():
                for layer in queue:
                    layer.prepare(self._readings)
                if last:
                    self._readings.check()
                numbers = [self._layers.index(layer) for layer in queue]  # the same on all ranks
                verdict, ready, all_last = self._adapter.consensus.agree(None, numbers, last)
                self._raise(verdict)
                for number in ready:
                    self._process(self._layers[number])
                    self._queue.remove(self._layers[number])
            if not last or all_last:
                break

    def _process(self, layer: Layer) -> None:
        plan = self._plan(layer)
        if layer.lent:  # it is compared at the end, and may come again
            layer.came.plan = plan
            return
        layer.released_in = self._call
        self._in_use.update([one.untyped_storage()._cdata for one, _, _ in plan.copies()])
        self._preserved.discard(layer)
        self._accessible.clear()
        # An identity is the address of a storage's descriptor: a weak reference keeps it from being used again.
        self._freed += [StorageWeakRef(one.storage.get()) for one in layer.params if one.tensor is not None]
        if self._atomic == "layer" and not layer.borrowed:
            if plan.owns_resources:  # it gives fresh values away
                self._readings.check()
            plan.apply()
            layer.release()
        else:
            layer.came.plan = plan
            plan.tables = [(t, t.copy()) for m in layer.modules for t in (m._parameters, m._buffers)]
            layer.release(needed=plan.fresh)

    def _plan(self, layer: Layer) -> Plan:
        """Post-process what was loaded into a layer; return the way into the live layer."""
        self._scales.staged(layer)
        plan = None if layer.processed or layer.waits else layer.plan_values()
        if plan is None:
            self._readings.launch()
            plan = self._processed(layer)
        self._news |= not (self.joined.planned(layer, plan) or layer.lent)
        if layer.borrowed:
            plan.spare(layer.borrowed)
        layer.came.processed = self._call or 1
        return plan

    def _processed(self, layer: Layer) -> Plan:
        log = self._watched if self._atomic == "model" or layer.borrowed else None
        host = torch.device("cpu")
        process = self._adapter.process
        if log is not None or torch.get_default_device() != host:
            # as outside of any, where engines process; a mode of torch's would see every call of its functions
            def process(module: torch.nn.Module) -> None:
                with log or nullcontext(), host:
                    self._adapter.process(module)

        try:
            with self._adapter.context():
                plan = layer.process(self._layer_state, process, self._adapter.compiled())
        except BaseException:
            if log is not None:
                log.undo()
            raise
        if log is not None:
            plan.hold_back(log)
        return plan

    # -- committing --------------------------------------------------------------------------------------

    def commit(self, missing: list[str], derive: Callable[[list[Undo] | None], None], by_name: bool) -> bool:
        """Carry out all plans, process the deferred layers, and let the model derive what it derives itself.

        Args:
            missing: what did not come.
            derive: runs the model's own hooks; receives a list to add the steps back to, or None.
            by_name: the sender has said that all it has is there.

        Returns:
            Whether there was anything to commit.

        Raises:
            PatchError: something is missing, on this rank or another."""
        self._dropped = False
        left_out = not missing and bool(self.missing(partial=False, by_name=by_name))
        check_staged(self._layers)
        last = [layer for layer in self._layers if layer.comes_last(left_out)]
        last.sort(key=lambda layer: layer.deferred)
        for layer in last:
            layer.prepare(self._readings, left_out)
        self._readings.check()
        for layer in last:
            self._scales.staged(layer)
        verdict, nothing = self._adapter.consensus.agree_on_commit(self._objection(missing), self.empty)
        self._raise(verdict)
        if nothing:
            return False
        followers = [layer for layer in self.joined.followers(self._layers) if not layer.lent]
        before = self.mixed
        undo: list[Undo] | None = [] if self._atomic == "model" else None
        self.mixed = True  # until all is in place
        try:
            for layer in self._layers:
                if layer.came.plan is not None and not layer.lent:
                    layer.came.plan.apply(undo)
            for layer in followers:
                layer.take_live(self._readings)
            for layer in (*followers, *last):  # they look at other layers, which hold the new values now
                with tensors.Unseen():
                    self._plan(layer).apply(undo)
                layer.release()
            self._readings.check()
            with self._adapter.context():
                derive(undo)
        except BaseException:
            for step in reversed(undo or []):
                step()
            self.mixed = before or undo is None
            raise
        for check in self._checks:
            check.committed()
        for layer in self._layers:
            layer.learn_what_came(by_name)
        self._shapes |= self._came_as
        return True

    def _objection(self, missing: list[str]) -> str | None:
        """Return why what came cannot be committed, or None."""
        if missing:
            return f"the update is incomplete: {listed(missing)} did not come"
        self._refuse()
        if names := self._unlike_the_lender():
            return f"{listed(names)} came with other values than the policy has, whose tensors they are: leave them out"
        replaced = [
            f"{layer.name}.{key}"
            for layer in self._layers
            if layer.came.plan is not None
            for key in layer.came.plan.replaced()
        ]
        return f"{listed(replaced)} was replaced by another tensor during the update" if replaced else None

    def _unlike_the_lender(self) -> list[str]:
        """Return the tensors that came with other values than the model has that lends them."""
        plans = (layer.came.plan for layer in self._layers if layer.borrowed and layer.came.plan is not None)
        return [name for plan in plans for live, fresh, name in plan.spared if not torch.equal(live, fresh)]

    def _refuse(self) -> None:
        for check in self._checks:
            if (error := check.refusal()) is not None:
                raise error

    def _raise(self, verdict: str | None) -> None:
        """Raise, on every rank, the first error of any."""
        if verdict:
            self.verdict = self._error(verdict, "Send a complete update.")
            raise self.verdict

    def _error(self, problem: str, advice: str) -> PatchError:
        return update_error(problem, advice, type(self._model).__name__)


@functools.lru_cache(1 << 10)  # a hit is no call of Python
def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without dimensions of 1: a scale may come as [], [1] or [n, 1]."""
    return tuple([size for size in shape if size != 1])
