"""An update of one model's weights as a transaction.

`ManagedModel` follows a model from its birth. The first load teaches it which (parameter, shard) pairs this
rank expects. From then on every call of ``model.load_weights`` is part of an update: it opens one if none is
open, loads into staged tensors, and processes each layer as soon as it is complete. `finish` ends it.

States: ``loading`` (before the first load is over), ``ready``, ``open``, ``broken`` (a failed or incomplete
update has left layers of several policies: nothing may be generated until a complete update).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.precision.quantize_on_load import Rounding
from flashpatch.patches.fp8.refit.coverage import Coverage
from flashpatch.patches.fp8.refit.fold import Plan
from flashpatch.patches.fp8.refit.layer import Layer
from flashpatch.patches.fp8.refit.layer_state import Ownership
from flashpatch.patches.fp8.refit.pristine_params import Slot, record, storage_table
from flashpatch.patches.fp8.refit.write_tracker import Names, Watch

logger = logging.getLogger("flashpatch.fp8")

PATCH = "fp8.update"
_TOGETHER = 8  # complete layers that several ranks process after one agreement
_SHOWN = 6  # names listed in a message before "and N more"
_changes = itertools.count(1)  # of state, of all models: no number comes twice


@dataclass
class Host:
    """What the transaction needs from the engine around the model.

    Attributes:
        device: where the weights live.
        process: post-processes one module as the engine's loader does.
        deferred: whether a module is processed after all others.
        context: entered around post-processing (default dtype, engine configuration).
        finalize: called with the model once all layers are in place.
        begin: tells the ranks' agreements that a new update opens; its number, the same on all ranks.
        ranks: number of ranks that hold parts of this model and process it together.
        agree: blocks until all ranks have called it with (error, layers ready, nothing more to come) and
            returns the first error any of them gave or announced, the layers ready on all, whether all are done.
        announce: tells the other ranks of a failure without waiting for them.
        refuse: why this engine cannot be updated at all, or None.
        busy: whether requests are running.
        rounded: relative error with which a module, whose fresh values are in it, will be rounded; None where it
            is not, or was before.
    """

    device: torch.device
    process: Callable[[torch.nn.Module], None]
    deferred: Callable[[torch.nn.Module], bool]
    context: Callable[[], AbstractContextManager]
    finalize: Callable[[torch.nn.Module], None] = lambda model: None
    ranks: int = 1
    begin: Callable[[], int | None] = lambda: None
    agree: Callable[[str | None, list[int], bool], tuple[str | None, list[int], bool]] = lambda *mine: mine
    announce: Callable[[str], None] = lambda error: None
    refuse: Callable[[], str | None] = lambda: None
    busy: Callable[[], bool] = lambda: False
    rounded: Callable[[torch.nn.Module], float | None] = lambda module: None


@dataclass
class Policy:
    """Where a model's weights stand, as reported to the scheduler."""

    state: str
    version: int
    missing: list[str] = field(default_factory=list)
    error: str = ""


class ManagedModel:
    """One model whose weights can be updated in place.

    Args:
        model: the model, just constructed, nothing loaded.
        host: see `Host`.
        options: the family's options: ``atomic``, ``partial``, ``in_flight``.
        rounding: rounds what comes into 8-bit parameters; None where nothing is.
    """

    def __init__(
        self, model: torch.nn.Module, host: Host, options: Mapping[str, Any], rounding: Rounding | None = None
    ) -> None:
        self.host = host
        self.rounding = rounding
        self.errors: dict[str, float] = {} if rounding is None else rounding.errors
        self.options = options
        self.version = 0
        self.changes = 0
        self.state = "loading"
        self.error = ""
        self._lock = threading.Lock()
        self._inside = False
        self._plans: dict[Layer, Plan] = {}
        self._queue: list[Layer] = []
        self._discarded = False
        self._mixed = False  # the live layers may be of several policies: only a complete update helps
        self._verdict: PatchError | None = None
        self._number: int | None = None  # of the open update, where several ranks count them
        self._call = 0  # number of the load_weights call under way
        self._root = model
        self._unsupported = ""  # why this model cannot be updated, found at its birth
        try:
            self.layers = _layers(model, host)
        except PatchError as error:
            self._unsupported, self.layers = error.problem, []
        self._ownership = Ownership([layer.modules for layer in self.layers], _fixed(model, self.layers))
        for layer in self.layers:
            layer.remember_birth(self._ownership)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "state":
            super().__setattr__("changes", next(_changes))

    # -- what the engine's doors call ------------------------------------------------------------------

    @property
    def inside_load(self) -> bool:
        """Whether ``model.load_weights`` is running."""
        return self._inside

    def load(self, original: Callable[..., Any], weights: Iterable, **kwargs: Any) -> Any:
        """Stand in for ``model.load_weights(weights)``: one bucket of an update, or the first load."""
        with self._alone():
            self._inside = True
            try:
                if self.rounding is not None:
                    weights = self.rounding.prepared(weights, first=self.state == "loading")
                names = Names(weights)
                if self.state == "loading":
                    return self._first_load(original, names, **kwargs)
                return self._load_bucket(original, names, **kwargs)
            finally:
                self._inside = False

    def sealed(self) -> None:
        """The first load and its post-processing are over."""
        if self.state == "loading":
            learned = [
                slot.expected for layer in self.layers for slot in layer.slots if slot.expected is not None
            ]
            if learned and not any(expected.covered for expected in learned):
                self._unsupported = "its loader writes where it cannot be followed, in other threads perhaps"
            self._ownership.learn([layer.modules for layer in self.layers])
            self.state = "ready"

    def begin(self) -> None:
        """Open a fresh update, dropping what an unfinished one had staged."""
        with self._alone():
            self._begin()

    def _begin(self) -> None:
        number = self.host.begin()
        problem = self._objection()
        if problem is not None:
            self.host.announce(problem.problem)
            raise problem
        self._note_mixture()
        self._drop()
        self._number = number
        self.state = "open"

    def _objection(self) -> PatchError | None:
        """What speaks against opening an update now."""
        reason = self._unsupported or self.host.refuse()
        if reason:
            return self._problem(
                f"weights of this engine cannot be updated: {reason}", "Open a new engine on them."
            )
        if self.options["in_flight"] == "refuse" and self.host.busy():
            return self._problem(
                "requests are running, so the update is refused",
                "Wait for them, or set the option in_flight to abort, recompute or keep.",
            )
        if self._discarded and self.options["atomic"] == "model":
            return self._problem(
                "sleep level 2 discarded the weights, so atomic='model' has nothing to fall back to",
                "Use atomic='layer' for the update after a level 2 sleep.",
            )
        return None

    def finish(self, partial: bool | None = None) -> None:
        """Commit the open update; nothing if none is open.

        Args:
            partial: accept that some layers were not sent at all; None means the family's option.

        Raises:
            PatchError: something is missing; it is named.
        """
        with self._alone():
            self._finish(partial)

    def _finish(self, partial: bool | None = None) -> None:
        if self.state == "broken" and self.error:
            raise self._problem(self.error, "Send a complete update.")
        if self.state != "open":
            return
        missing = self._missing(self.options["partial"] if partial is None else partial)
        with self._failing(), torch.no_grad():
            last = [
                layer for layer in self.layers if layer.deferred and layer.complete and not layer.processed_in
            ]
            for layer in last:
                layer.prepare()
            self._agree(f"the update is incomplete: {_list(missing)} did not come" if missing else None, [])
            for layer in last:
                self._process(layer)
            self._mixed = True  # until all is in place
            for plan in self._plans.values():
                plan.apply()
            with self.host.context():
                self.host.finalize(self._root)
        self._drop()
        self._discarded = self._mixed = False
        self.version = self._number or self.version + 1
        self.state, self.error = "ready", ""

    def withdraw(self) -> bool:
        """Close an open update that has written nothing; whether there was such a one."""
        with self._alone():
            idle = self.state == "open" and not any(
                layer.touched or layer.processed_in for layer in self.layers
            )
            if idle:
                self._drop()
                self.state = "broken" if self.error else "ready"
            return idle

    def settle(self) -> None:
        """Before a step: commit an update that is complete but was never finished by its sender."""
        if self.state == "open" and not self._inside and not self._missing(self.options["partial"]):
            self.finish()

    def discarded(self) -> None:
        """The weights are gone (sleep level 2): nothing may be generated before a complete update."""
        self._drop()
        self._discarded = True
        self.state = "broken"
        self.error = "the weights were discarded (sleep level 2) and no complete update has come since"

    def policy(self) -> Policy:
        missing = self._missing(self.options["partial"]) if self.state == "open" else []
        state = "broken" if self.state == "open" and self._mixed else self.state
        return Policy(state, self.version, missing[:_SHOWN], self.error)

    @property
    def may_generate(self) -> bool:
        """Whether the live weights are one whole policy."""
        if self._inside or self._mixed or self._discarded:
            return False
        return self.state == "ready" or (self.state == "open" and self.options["atomic"] == "model")

    # -- loading ---------------------------------------------------------------------------------------

    def _first_load(self, original: Callable, names: Names, **kwargs: Any) -> Any:
        """Run the engine's own first load and learn what it writes."""
        slots = [slot for layer in self.layers for slot in layer.slots]
        held = {id(slot): slot.live() for slot in slots}
        for slot in slots:
            if slot.expected is None:
                slot.expected = Coverage(slot.shape, slot.stride, slot.offset)
        table = storage_table(slots, lambda slot: held[id(slot)])
        with Watch(table, lambda slot, view: slot.expected.add(view, names.current)):
            return original(names, **kwargs)

    def _load_bucket(
        self, original: Callable, names: Names, partial: bool | None = None, **kwargs: Any
    ) -> Any:
        if self.state != "open":
            self._begin()
        self._call += 1
        with self._failing(names), torch.no_grad():
            result = self._load_staged(original, names, **kwargs)
        if partial:
            self._finish(partial=True)
        return result

    def _load_staged(self, original: Callable, names: Names, **kwargs: Any) -> Any:
        owner = {id(slot): layer for layer in self.layers for slot in layer.slots}
        guarded = _live_storages(self._root)
        incomplete: dict[Layer, None] = {}  # layers written in this call and not complete yet, in order

        def on_touch(slot: Slot) -> None:
            if owner[id(slot)].processed_in == self._call:
                raise self._problem(
                    f"{names.current or slot.name} came twice in one update", "Send each tensor once."
                )
            slot.touch()

        def on_write(slot: Slot, view: torch.Tensor) -> None:
            layer = owner[id(slot)]
            if layer.processed_in or (layer in self._queue and layer.opened_in != self._call):
                self._restart(names.current or slot.name)
            layer.opened_in = layer.opened_in or self._call
            slot.coverage.add(view, names.current)
            incomplete[layer] = None

        def pass_on() -> Iterator[tuple[str, torch.Tensor]]:
            for item in names:
                yield item
                self._take_complete(incomplete)

        with ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.leave)
                layer.enter()
            slots = [slot for layer in self.layers for slot in layer.slots]
            table = storage_table(slots, lambda slot: slot.tensor)
            stack.enter_context(Watch(table, on_write, on_touch, guarded))
            result = original(pass_on(), **kwargs)
            self._take_complete(incomplete)
            for layer in self.layers:
                layer.check_staged()
        self._process_queue(last=True)
        return result

    def _take_complete(self, incomplete: dict[Layer, None]) -> None:
        """Queue the layers that have become complete; process the queue when it may not wait."""
        for layer in [layer for layer in incomplete if layer.complete and not layer.deferred]:
            del incomplete[layer]
            if layer not in self._queue:
                self._queue.append(layer)
        if self.host.ranks == 1 or len(self._queue) >= _TOGETHER:
            self._process_queue()

    def _process_queue(self, last: bool = False) -> None:
        """Process the layers that are complete on every rank; ``last``: at the end of a call, until all ranks are."""
        while self._queue or self.host.ranks > 1:
            with _disable_current_modes():
                for layer in self._queue:
                    layer.prepare()
            ready, all_last = self._agree(None, [self.layers.index(layer) for layer in self._queue], last)
            for number in ready:
                self._process(self.layers[number])
                self._queue.remove(self.layers[number])
            if not last or all_last:
                break

    def _process(self, layer: Layer) -> None:
        paths = {id(slot.module): slot.name.rpartition(".")[0] for slot in layer.slots}

        def processing(module: torch.nn.Module) -> None:
            error = self.host.rounded(module)
            if error is not None:
                self.errors[paths[id(module)]] = error
            self.host.process(module)

        with _disable_current_modes(), self.host.context():
            if self.options["atomic"] == "layer":
                layer.process(self._ownership, processing).apply()
            else:
                self._plans[layer] = layer.process(self._ownership, processing)
        layer.release()
        layer.processed_in = self._call or 1

    def _restart(self, name: str) -> None:
        """A tensor of a layer that was complete already came again: a new update has begun."""
        logger.warning("%s came again: taking it as the start of a new update", name)
        self._note_mixture()
        for layer in self.layers:
            if layer.opened_in != self._call:
                layer.forget()
                self._plans.pop(layer, None)
                if layer in self._queue:
                    self._queue.remove(layer)

    # -- outcome ---------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise self._problem("another update is loading into this model", "Send one update at a time.")
        try:
            yield
        finally:
            self._lock.release()

    def _note_mixture(self) -> None:
        """Before an unfinished update is dropped: layers of it may be in place already."""
        if self.options["atomic"] == "layer" and any(layer.processed_in for layer in self.layers):
            self._mixed = True

    def _missing(self, partial: bool) -> list[str]:
        partial = partial and not self._discarded and not self._mixed
        waiting = [layer for layer in self.layers if not layer.processed_in]
        missing = [name for layer in waiting if layer.touched or not partial for name in layer.missing()]
        return missing + [f"a part of {layer.name} on another rank" for layer in self._queue]

    def _agree(self, error: str | None, ready: list[int], last: bool = True) -> tuple[list[int], bool]:
        """The layers ready on every rank, and whether all are done; raise, on every rank, the first error of any."""
        mine = (error, ready, last)
        verdict, ready, last = self.host.agree(*mine) if self.host.ranks > 1 else mine
        if verdict:
            problem = self._problem(verdict, "Send a complete update.")
            self._verdict = problem  # all ranks know it
            raise problem
        return ready, last

    @contextmanager
    def _failing(self, names: Names | None = None) -> Iterator[None]:
        """Within, any exception abandons the update; it is raised on with a note of what follows."""
        try:
            yield
        except BaseException as error:
            heard, self._verdict = error is self._verdict, None
            self._note_mixture()
            self._drop()
            if self.options["atomic"] == "layer" or self._mixed:
                problem = (
                    error.problem if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"
                )
                self.state, self.error = "broken", f"the last update failed: {problem}"
                after = "generation is refused until a complete update"
            else:
                self.state, after = "ready", "the old policy stays in place, unchanged"
            at = f" at {names.current}" if names is not None and names.current else ""
            error.add_note(f"[flashpatch: {PATCH}] weight update abandoned{at}; {after}.")
            if not heard:
                self.host.announce(f"{type(error).__name__}: {error}")
            raise

    def _drop(self) -> None:
        self._plans.clear()
        self._queue.clear()
        self._call = 0
        for layer in self.layers:
            layer.reset()

    def _problem(self, problem: str, advice: str) -> PatchError:
        return PatchError(problem, patch=PATCH, target=type(self._root).__name__, advice=advice)


def _layers(model: torch.nn.Module, host: Host) -> list[Layer]:
    """Group the model's modules into layers: modules that share memory belong together."""
    modules = dict(model.named_modules())
    slots = record(modules, host.device)
    group: dict[int, set[int]] = {}
    by_storage: dict[int, int] = {}
    for slot in slots:
        first = by_storage.setdefault(id(slot.storage), id(slot.module))
        merged = group.setdefault(first, {first}) | group.setdefault(id(slot.module), {id(slot.module)})
        group.update(dict.fromkeys(merged, merged))
    layers, placed = [], set()
    for module in modules.values():
        if id(module) in placed:
            continue
        members = group.get(id(module), {id(module)})
        placed |= members
        together = [m for m in modules.values() if id(m) in members] if len(members) > 1 else [module]
        own = [slot for slot in slots if id(slot.module) in members]
        deferred = any(host.deferred(m) for m in together)
        if own or deferred:
            layers.append(Layer(together, own, deferred))
    return layers


def _fixed(model: torch.nn.Module, layers: list[Layer]) -> list[torch.nn.Module]:
    """The modules that are layers, and every module above one."""
    layered = {id(module) for layer in layers for module in layer.modules}
    return [m for m in model.modules() if any(id(below) in layered for below in m.modules())]


def _live_storages(model: torch.nn.Module) -> dict[int, str]:
    """Storage identity to name, for every parameter and buffer with memory of its own."""
    storages = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not hasattr(tensor, "__tensor_flatten__"):
            storages[tensor.untyped_storage()._cdata] = name
    return storages


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
