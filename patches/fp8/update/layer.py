"""One layer's part in an update: the modules that share tensors, what was staged for them, and what of it has come."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.precision.readings import Readings
from flashpatch.patches.fp8.update.events import REPORT, update_error
from flashpatch.patches.fp8.update.process import Derived, LayerState, LayoutChanged, Plan, Snapshot, compare
from flashpatch.patches.fp8.update.tensors import PristineParam, SharedStorage, record


@dataclass(eq=False)
class Came:
    """What of the open update has come for one layer: to forget it is to forget all of that, and nothing else.

    Attributes:
        opened: number of the load call that first wrote to the layer; 0: none has.
        processed: number of the call that completed it; 0: it is not complete yet.
        queued: it is complete, and waits to be processed.
        later: writes of the present call, if an earlier one opened the layer: what is written, and by which name.
        filled: names of parameters that a loader has filled in, see `NamedWeights.fills`.
        unexpected: parameters and buffers of which nothing had shown that they come; again: those that have to come once more.
        scales: each scale that was written, and its values if they are small.
        shared: shared storage -> the new values for it, and their name.
        plan: the way of the processed values into the live layer, until the commit."""

    opened: int = 0
    processed: int = 0
    queued: bool = False
    later: list[tuple[PristineParam, torch.Tensor, str]] = field(default_factory=list)
    filled: set[str] = field(default_factory=set)
    unexpected: list[PristineParam] = field(default_factory=list)
    again: list[PristineParam] = field(default_factory=list)
    scales: list[tuple[PristineParam, torch.Tensor | None]] = field(default_factory=list)
    shared: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    plan: Plan | None = None


class Layer:
    """The modules that must be processed together because they share tensors; mostly a single module.

    Args:
        modules: the modules, in the model's order.
        params: their tensors as the constructor made them.
        deferred: processed after all other layers (attention-like layers that look at their neighbours).
        processed: whether post-processing does anything to a module of it.
        borrows: whether a foreign resource may point into its tensors.

    Attributes:
        borrowed: storages in use that are another model's: what comes for them is compared, and never written.
        derived: keys that post-processing has set.
        lent: all of its parameters lie there."""

    lent = False
    borrowed: Collection[int] = frozenset()

    def __init__(
        self,
        modules: list[torch.nn.Module],
        params: list[PristineParam],
        deferred: bool,
        processed: bool = True,
        borrows: bool = True,
    ) -> None:
        self.modules = modules
        self.params = params
        self.deferred = deferred
        self.processed = processed
        self.borrows = borrows
        self.came = Came()
        self.released_in = 0  # number of the load call whose loader holds staged tensors without memory
        self.tables: list[tuple[torch.nn.Module, dict, dict]] = []  # its parameters and buffers, staged
        self.live_tables: list[tuple[torch.nn.Module, dict, dict]] = []  # while staged tensors are shown
        self.pristine = Snapshot()  # without parameters and buffers
        self.derived = Derived()
        self._kept_alive: list[torch.Tensor] = []  # fresh tensors that a foreign resource may point into
        for param in params:
            param.optional, param.layer = deferred, self

    @property
    def name(self) -> str:
        return self.params[0].name.rpartition(".")[0] if self.params else type(self.modules[0]).__name__

    @property
    def complete(self) -> bool:
        for param in self.params:  # asked after every tensor, so without a generator
            if not param.complete:
                return False
        return True

    @property
    def written(self) -> bool:
        return any([param.coverage.covered for param in self.params])

    def places(self) -> set[int]:
        """Return the storages of its parameters in use."""
        live = [param.live() for param in self.params if not param.is_buffer]
        with torch._C.DisableTorchFunctionSubclass():
            return {one.untyped_storage()._cdata for one in live if one is not None and one.numel()}

    @property
    def waits(self) -> bool:
        """Whether a tensor of it may come still, or not at all: only the end of the update tells."""
        may_come = not self.came.processed and [one for one in self.params if one.is_buffer and one.may_come]
        return bool(may_come) and any([not param.written for param in may_come])

    def comes_last(self, left_out: bool) -> bool:
        """Whether it is processed at the end of an update, which leaves tensors out or not."""
        if self.deferred:
            return self.complete or (left_out and not self.written)  # it may look at others that came
        return self.waits and self.complete

    def copy_to_lend(self) -> Layer:
        """Return a layer of the same modules, as their constructor left them, of which nothing has come."""
        lent = copy.copy(self)
        storages = {
            id(one): SharedStorage(one.nbytes, one.device) for one in (p.storage for p in self.params)
        }
        lent.params = [
            dataclasses.replace(param, storage=storages[id(param.storage)], layer=lent, tensor=None)
            for param in self.params
        ]
        lent.came, lent.tables, lent.live_tables, lent._kept_alive, lent.released_in = Came(), [], [], [], 0
        return lent

    def consists_of(self, tensors: set[int]) -> bool:
        """Whether the layer has live parameters, and all are among ``tensors`` (identities)."""
        live = [
            param for module in self.modules for param in module._parameters.values() if param is not None
        ]
        return bool(live) and all(id(param) in tensors for param in live)

    def missing(self, named: bool) -> list[str]:
        """Return the names that the open update still has to bring for this layer; ``named``: it has an end of its own."""
        names = [name for param in self.params if not param.complete for name in param.missing()]
        names += [param.name for param in self.came.again if not param.written]
        undecided = () if named or self.came.processed else self.params
        return names + [one.name for one in undecided if one.is_buffer and one.undecided and not one.written]

    def learn_what_came(self, named: bool) -> None:
        """Keep what an update has brought: every one after it brings that too; ``named``: and no other buffers."""
        for param in self.params:
            if param in self.came.unexpected:
                param.brings = True
            elif named and param.is_buffer and param.undecided:
                param.brings = False

    def record_pristine_state(self, state: LayerState) -> None:
        """Record the Python state before post-processing, without tensors: `params` describe those."""
        self.pristine = state.capture(self.modules)
        for module in self.modules:
            contents = self.pristine.contents[id(module)][1]
            for table in (contents["_parameters"], contents["_buffers"]):
                table.update(dict.fromkeys(table))

    def note_loaded(self, state: LayerState, held: Mapping[int, torch.Tensor | None]) -> None:
        """Note what the first load has left, before post-processing, unless the load itself has post-processed the layer.

        Args:
            state: which containers belong to which layer.
            held: the tensors that it loaded into, by identity of their description."""
        for param in self.scales():
            if param.expected is not None and param.expected.covered:
                param.loaded = param.copy_small(held[id(param)])
        if all(param.live() is held[id(param)] for param in self.params):
            self.record_pristine_state(state)  # with numbers that the loader has set

    def learn_derived(self, state: LayerState) -> None:
        """Learn what the first load and its post-processing, just over, have set."""
        attributes = {(id(param.module), param.key): param.attributes for param in self.params}
        self.derived.learn(state.capture(self.modules), self.pristine, attributes)

    def derived_later(self, state: LayerState) -> list[str]:
        """Return attributes that the constructor left None and that hold a number now, as a first forward derives it."""
        now = state.capture(self.modules).contents
        return [
            f"{self.name}.{key}"
            for identity, (_, before) in self.pristine.contents.items()
            if isinstance(before, dict) and identity in now
            for key, value in before.items()
            if value is None and isinstance(now[identity][1].get(key), float)
        ]

    def scales(self) -> list[PristineParam]:
        """Return what scales a KV cache, or activations, for which a neighbour may round its output."""
        return [
            param
            for param in self.params
            if self.deferred or ("scale" in param.key and "weight" not in param.key)
        ]

    def reset(self) -> None:
        """Drop everything staged and start over."""
        self.released_in = 0
        self.forget()
        self.release()

    def forget(self) -> None:
        """Start over in the middle of a load: the loader holds the staged tensors, so they stay."""
        self.came = Came()
        for param in self.params:
            param.forget()

    def release(self, needed: frozenset[int] = frozenset()) -> None:
        """Free the staged tensors; a tensor that still uses their memory keeps it.

        A loader in the middle of a call holds the staged tensors, and uses them no more.

        Args:
            needed: identities of tensors that a plan still brings into the live layer."""
        self.tables = []
        staged: dict[SharedStorage, set[int]] = {}
        for param in self.params:
            if param.tensor is not None:
                staged.setdefault(param.storage, set()).add(id(param.tensor))
        if not staged:
            return
        adopted = {id(tensor) for tensor in [*self._kept_alive, *[param.live() for param in self.params]]}
        for storage, tensors in staged.items():
            storage.release(held_by=0 if tensors & (adopted | needed) else len(tensors))
        for param in self.params:
            param.forget()
            param.tensor = None

    def stage(self) -> None:
        """Make empty tensors to load into, and tables that show them."""
        tables = {
            id(m): (m, self.pristine.contents[id(m)][1]["_parameters"].copy(), {}) for m in self.modules
        }
        for param, staged in self._staged(shown=True):
            tables[id(param.module)][1 + param.is_buffer][param.key] = staged
        self.tables = list(tables.values())

    def prepare(self, readings: Readings, left_out: bool = False) -> None:
        """Check and complete what was loaded, before ranks go on together.

        Args:
            readings: asked whether the values are finite.
            left_out: the update leaves tensors out, which stay what was loaded before.

        Raises:
            PatchError: the values hold NaN or Inf, as far as that is known now, or were not written into the staged tensors."""
        check_staged([self])
        if self.live_tables:
            show_live([self])
        for param in self.params:
            written = param.written
            if not param.is_buffer or self._is_staged(param):
                param.fill(param.live(), left_out)
            if written:
                readings.finite(param.tensor, param.name)
                if (param.is_buffer and param.may_come) or (param.optional and param.expected is None):
                    self.came.unexpected.append(param)

    def take_live(self, readings: Readings) -> None:
        """Stage what the live layer holds: it came for another layer, whose memory this one shares."""
        for param in self.params:
            live = param.live()
            if param.required and live is not None:
                staged = param.stage()
                param.allocate(filled=True)
                staged.detach().copy_(live)
                param.coverage.add(staged)
        self.prepare(readings)

    def process(
        self, state: LayerState, process: Callable[[torch.nn.Module], None], compiled: bool = False
    ) -> Plan:
        """Post-process the loaded values as at a first load, and plan their way into the live layer.

        The live layer is in place again when this returns. Nothing of it has changed yet, apart from tensors that
        the post-processing itself writes in place.

        Args:
            state: which containers belong to which layer.
            process: post-processes one module.
            compiled: graphs or compiled code read the tensors in use.

        Raises:
            PatchError: the values do not fit the storage in use."""
        as_built = self.pristine.holds(self.modules)
        live = self.pristine.with_tables_of(self.modules) if as_built else state.capture(self.modules)
        try:
            initial = self._restore_pristine()
            before = self.pristine.with_tables_of(self.modules)
            for module in self.modules:
                process(module)
            after = before if as_built and before.holds() else state.capture(self.modules)
        finally:
            live.restore()
        if after is before and (plan := self.plan_values(compiled)) is not None:
            return plan
        plan = self._new_plan(compiled)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                compare(self.name, self.modules, live, before, after, initial, plan)
        except LayoutChanged as error:
            raise _unfit(error) from error
        fresh = after.module_tensors()
        plan.fresh = frozenset(map(id, fresh))
        plan.assign(vars(self), "_kept_alive", fresh if self.borrows and plan.owns_resources else [])
        return plan

    def plan_values(self, compiled: bool = False) -> Plan | None:
        """Plan the way of each staged tensor into its own live one, as post-processing has done nothing; None if one has none.

        Raises:
            PatchError: the values do not fit the storage in use."""
        staged = [param for param in self.params if not param.is_buffer or self._is_staged(param)]
        pairs = [(param.live(), param.stage(), param.name) for param in staged]
        if any([live is None for live, _, _ in pairs]):
            return None
        plan = self._new_plan(compiled)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                for live, fresh, name in pairs:
                    plan.pair(live, fresh, name)
        except LayoutChanged as error:
            raise _unfit(error) from error
        return plan

    def _new_plan(self, compiled: bool = False) -> Plan:
        attributes = {id(param.tensor): param.attributes for param in self.params if param.tensor is not None}
        return Plan(self.derived, attributes, compiled)

    def _is_staged(self, param: PristineParam) -> bool:
        if not param.is_buffer or param.alias:
            return True
        if param.may_come and param.initial is not None and not self.deferred:
            return True  # dummy values may lie on it
        return param.required or param.written

    def _staged(self, shown: bool = False) -> list[tuple[PristineParam, torch.Tensor]]:
        """Return what is loaded into, or is ``shown`` to a loader, and the staged tensor: one for all parameters that are it."""
        twins: dict[tuple, torch.Tensor] = {}
        found = []
        for param in self.params:
            if not param.is_buffer or self._is_staged(param) or (shown and param.may_come):
                identity = (id(param.storage), param.offset, param.shape, param.stride)
                staged = param.stage() if param.tensor is None else param.tensor
                param.tensor = twins.setdefault(identity, staged)
                found.append((param, param.tensor))
        return found

    def _restore_pristine(self) -> dict[int, int]:
        """Put the modules back to how their constructor left them, with the loaded tensors in place.

        Returns:
            Of buffers at their initial values: identity to the number of writes so far. Those to inference tensors are
            not counted, so that these are left out."""
        buffers = [module._buffers.copy() for module in self.modules]
        self.pristine.restore()
        for module, live in zip(self.modules, buffers):
            for key, value in live.items():
                if key in module._buffers:
                    module._buffers[key] = value
        initial = {}
        for param in self.params:
            if param.is_buffer and param.initial is not None and param.key in param.module._buffers:
                buffer = param.initial.to(param.storage.device, copy=True)
                param.module._buffers[param.key] = buffer
                if not buffer.is_inference():
                    initial[id(buffer)] = buffer._version
        for param, staged in self._staged():
            table = param.module._buffers if param.is_buffer else param.module._parameters
            table[param.key] = staged
        return initial


def _unfit(error: LayoutChanged) -> PatchError:
    return update_error(
        f"the new weights cannot take the place of the old ones: {error}.",
        "Open a new engine on them, or report this layer.",
    )


def show_staged(layers: Iterable[Layer]) -> None:
    """Put staged tensors in place of the live ones, whose tables are set aside untouched.

    Every bucket shows every layer, as a loader may ask for any tensor: this makes no call for a layer."""
    for layer in layers:
        for module, parameters, buffers in layer.tables:
            state = module.__dict__
            layer.live_tables += [(module, state["_parameters"], state["_buffers"])]
            state["_parameters"] = {**parameters}
            state["_buffers"] = {**state["_buffers"], **buffers}


def check_staged(layers: Iterable[Layer], memory: bool = True) -> None:
    """Check that loaders have written to the tensors that they are shown and not replaced them, nor their ``memory``.

    Raises:
        PatchError: names a tensor that was replaced; what was loaded into its place would be lost."""
    with torch._C.DisableTorchFunctionSubclass():
        for layer in layers:
            for param in layer.params:
                staged = param.tensor
                if staged is None:
                    continue
                table = param.module.__dict__["_buffers" if param.is_buffer else "_parameters"]
                if (layer.live_tables and (param.key not in table or table[param.key] is not staged)) or (
                    memory and staged.untyped_storage()._cdata != param.storage.identity
                ):
                    raise update_error(
                        f"{param.name} was replaced by the weight loader instead of written to", REPORT
                    )


def show_live(layers: Iterable[Layer]) -> None:
    """Put back exactly what was there before `show_staged`; nothing where that has been done."""
    for layer in layers:
        for module, parameters, buffers in layer.live_tables:
            state = module.__dict__
            state["_parameters"], state["_buffers"] = parameters, buffers
        layer.live_tables = []


def group_layers(
    model: torch.nn.Module,
    device: torch.device,
    deferred: Callable[[torch.nn.Module], bool],
    processes: Callable[[torch.nn.Module], bool] = lambda module: True,
    borrows: Callable[[torch.nn.Module], bool] = lambda module: True,
) -> list[Layer]:
    """Group modules that share memory; every other module with tensors is a layer by itself.

    Args:
        model: just constructed, nothing loaded.
        device: where the weights live.
        deferred: whether a module is processed after all others.
        processes: whether post-processing does anything to a module.
        borrows: whether a foreign resource that it makes may point into the module's tensors.

    Raises:
        PatchError: a parameter has no shape before it is loaded."""
    modules = dict(model.named_modules())
    params = record(modules, device)
    group: dict[int, set[int]] = {}
    by_storage: dict[int, int] = {}
    for param in params:
        first = by_storage.setdefault(id(param.storage), id(param.module))
        merged = group.setdefault(first, {first}) | group.setdefault(id(param.module), {id(param.module)})
        group.update(dict.fromkeys(merged, merged))
    layers, placed = [], set()
    of_module: dict[int, list[PristineParam]] = {}
    for param in params:
        of_module.setdefault(id(param.module), []).append(param)
    for module in modules.values():
        if id(module) in placed:
            continue
        members = group.get(id(module), {id(module)})
        placed |= members
        together = [m for m in modules.values() if id(m) in members] if len(members) > 1 else [module]
        own = [param for member in together for param in of_module.get(id(member), ())]
        last = any(deferred(m) for m in together)
        if own or last:
            layers.append(
                Layer(together, own, last, any(map(processes, together)), any(map(borrows, together)))
            )
    return layers


def find_lent(
    model: torch.nn.Module, layers: list[Layer], lenders: Sequence[Layer]
) -> list[torch.nn.Module] | None:
    """Find, in place, what engines share of a target with its drafter: modules, or the tensors of modules.

    Args:
        model: the drafter, or a target: of that nothing is lent, but modules may have left it.
        layers: its layers. Those whose modules have left the model go, and those of modules that it was given come.
        lenders: the target's layers.

    Returns:
        The modules that no layer owns now, or None if all modules are as they were."""
    present, below = set(), [model]
    while below:  # as `model.modules()`, which asks a generator for each module above a module
        module = below.pop()
        if module is not None and id(module) not in present:
            present.add(id(module))
            below += module._modules.values()
    kept = [layer for layer in layers if any([id(module) in present for module in layer.modules])]
    own = {id(module) for layer in kept for module in layer.modules}
    given = [one for one in lenders if any(id(m) in present and id(m) not in own for m in one.modules)]
    changed = len(kept) < len(layers) or given
    layers[:] = [*kept, *(one.copy_to_lend() for one in given)]
    lent = {place for layer in lenders for place in layer.places()}
    for layer in layers:
        places = layer.places() if lent else set()
        layer.borrowed = places & lent
        layer.lent = 0 < len(layer.borrowed) == len(places)
    if not changed:
        return None
    own |= {id(module) for layer in given for module in layer.modules}
    foreign = [m for m in model.modules() if id(m) not in own and (m._parameters or m._buffers)]
    return [*layers_and_parents(model, layers), *foreign]


def layers_and_parents(model: torch.nn.Module, layers: list[Layer]) -> list[torch.nn.Module]:
    """Return the modules that are layers, and every module above one."""
    layered = {id(module) for layer in layers for module in layer.modules}
    return [m for m in model.modules() if any(id(below) in layered for below in m.modules())]
