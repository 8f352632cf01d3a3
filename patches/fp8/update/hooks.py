"""See what a model does to itself: what its own hooks derive, and what its loader leaves beside tensors.

A model's ``process_weights_after_loading`` runs once per update, at the commit, on attributes as they were before its first
run; a `Plan` copies the results into the objects in use. A ``load_weights`` that derives tensors by itself cannot be followed."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress, repeat
from typing import Any, Literal

import torch

from flashpatch.patches.fp8.update import process
from flashpatch.patches.fp8.update.events import listed, update_error
from flashpatch.patches.fp8.update.tensors import WriteLog

Place = tuple[int, str]
"""Identity of a container, and a key or attribute of it."""


def changes(before: process.Snapshot) -> dict[Place, tuple[Any, Any]]:
    """Return where containers hold another object than in a snapshot: the container or registered table, and what it held.

    Of registered tensors only new ones count: those that were there are the layers' own."""
    found = {}
    for container, contents in [one for one in before.contents.values() if isinstance(one[1], dict)]:
        held = [(container, contents)]
        if isinstance(container, torch.nn.Module):
            held += [(process.table(container)[one], contents[one]) for one in ("_parameters", "_buffers")]
        for one, old in held:
            new = process.table(one)
            for key in (old.keys() | new.keys()) - process.TABLES:
                was = old.get(key, process.ABSENT)
                ours = one is container or was is None or was is process.ABSENT
                if ours and was is not new.get(key, process.ABSENT):
                    found[id(one), key] = one, was
    return found


class EngineState:
    """What a model's objects hold beside weights that is the engine's, and no policy's: child modules, tables without tensors,
    numbers, texts, and tensors of int64, which no weight makes, such as the tokens that an EAGLE-3 drafter drafts. Flags are left
    alone: many say what a call brought."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parents: list[torch.nn.Module] = []
        self._empty: list[Any] = []
        self._places: list[list[Any]] = [[], [], []]  # of numbers and empty tables: where, key, whose

    def note(self) -> None:
        """Note what is there after the first load, but not in objects of several modules: groups of ranks count their calls."""
        modules = list(self._model.modules())
        own = {id(vars(one).get(key)) for key in vars(torch.nn.Module()) for one in modules}
        held = [one for one in process.held_containers(modules) if id(one) not in own]
        self._parents = [one for one in modules if one._modules]
        self._empty = [one for one in held if isinstance(one, (dict, list)) and not one]
        shared = process.LayerState([[one] for one in modules], modules).shared
        empty = set(map(id, self._empty))
        tables = [(getattr(one, "__dict__", one), one) for one in held if id(one) not in shared]
        named = [(at, key, one, at[key]) for at, one in tables if isinstance(at, dict) for key in at]
        found = [place for *place, value in named if _is_number(value) or id(value) in empty]
        self._places = [[place[part] for place in found] for part in range(3)]

    def note_table(self, container: Any, key: str) -> None:
        """Note where a loader makes a table."""
        for part, value in zip(self._places, (process.table(container), key, container)):
            part.append(value)

    def forget_gone(self) -> None:
        """Let go of objects that have left the model, so that their memory is freed."""
        held = set(map(id, process.held_containers(self._model.modules())))
        left = [id(one) in held for one in self._places[2]]
        self._places = [list(compress(part, left)) for part in self._places]

    @contextmanager
    def kept(self, derives: Callable[[Any, str], bool]) -> Iterator[None]:
        """Within, a call of ``load_weights`` of an update; what it takes away or changes is put back.

        Args:
            derives: whether post-processing, which may be of this call, has set what an object holds under a key.

        Raises:
            PatchError: numbers would be others; or tensors are kept for a later call, which may be one of another update."""
        children = [(one._modules, {**one._modules}) for one in self._parents]
        empty, before, others = [one for one in self._empty if not one], self._values(), []
        try:
            yield
        finally:
            for modules, old in children:
                if modules != old:  # a loader of a drafter takes away what a call has not brought
                    modules.update({**dict.fromkeys(modules), **old})
            now = self._values()
            for at in compress(range(len(now)), map(operator.is_not, before, now)):
                was, value, (held, key, one) = before[at], now[at], [part[at] for part in self._places]
                if (isinstance(was, process.NUMBERS) and _equal(was, value)) or derives(one, key):
                    continue
                if _is_number(was):
                    held[key] = was
                    others += [] if _equal(was, value) else [f"{type(one).__name__}.{key}"]
                elif isinstance(value, (dict, list)):
                    empty.append(value)
            filled = [one for one in empty if one and any(True for _ in process.tensors_below(one))]
            for one in filled:
                one.clear()
        if filled:
            problem = f"the loader keeps tensors in a {type(filled[0]).__name__} for a later call"
            advice = "Send in one call what belongs together, such as a weight and its scale."
            raise update_error(problem, advice, type(self._model).__name__)
        if others:
            problem = f"{listed(others)} would be other numbers"
            raise update_error(problem, "Open a new engine on them.", type(self._model).__name__)

    def _values(self) -> list[Any]:
        return list(map(dict.get, *self._places[:2], repeat(process.ABSENT)))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.int64
    return isinstance(value, process.NUMBERS) and not isinstance(value, bool)


def _equal(was: Any, now: Any) -> bool:
    same = torch.equal if isinstance(was, torch.Tensor) else operator.eq
    return type(now) is type(was) and same(now, was)


NAME = "process_weights_after_loading"


class ModelHooks:
    """Stand in for the hooks of one model: ``process_weights_after_loading`` of the model and of modules in it.

    Args:
        model: the model, just constructed.
        deferred: whether the engine calls a module's method itself, as a layer's.

    Attributes:
        phase: what a call of a hook means now: part of the ``first`` load, of a ``bucket``, or of a ``commit``.
        engine: what loads must leave as it is.
        deleted: names of modules with tensors that hooks have taken out of the model, so that none can be loaded."""

    def __init__(
        self, model: torch.nn.Module, deferred: Callable[[torch.nn.Module], bool] = lambda module: False
    ) -> None:
        self.phase: Literal["first", "bucket", "commit"] = "first"
        self.deleted: set[str] = set()
        self.engine = EngineState(model)
        self._model = model
        self._set: dict[Place, tuple[Any, Any]] = {}  # what hooks have set: the container, the value before
        self._called: set[torch.nn.Module] = set()  # in this commit
        self._originals: dict[torch.nn.Module, Callable[[], Any]] = {}  # outermost first
        for module in model.modules():
            hook = getattr(module, NAME, None)
            if hook is not None and not deferred(module) and not inspect.signature(hook).parameters:
                self._originals[module] = hook
                setattr(module, NAME, self._replacement(module))

    def remove(self) -> None:
        """Give the modules their own hooks back."""
        for module in self._originals:
            vars(module).pop(NAME, None)

    @contextmanager
    def watch_load(self, probe: bool) -> Iterator[list[str]]:
        """Within, a call of ``load_weights``; afterwards the list has what it has derived beside the parameters; of a ``probe`` nothing stays.

        Left out are layers that were post-processed meanwhile, as online quantization does, and what looks tensors up in the model's
        modules when it is asked, as SGLang 0.5.12's table of experts' weights does."""
        before, derived = self._snapshot(), []
        yield derived
        changed = changes(before)
        tables = {identity for identity, _ in changed}
        processed = {
            id(container)
            for module in self._model.modules()
            if not tables.isdisjoint((id(module._parameters), id(module._buffers)))
            for held in process.held_containers(module.modules())
            for container in (held, getattr(held, "_parameters", None), getattr(held, "_buffers", None))
        }
        modules = set(map(id, self._model.modules()))
        for place, (container, held) in changed.items():
            key, value = place[1], process.get(container, place[1])
            ours = place not in self._set and id(container) not in processed and not _is_number(value)
            if ours and any(True for _ in process.tensors_below(value, apart=modules)):
                derived.append(f"{type(container).__name__}.{key}")
            elif ours and probe and isinstance(value, (dict, list)):
                self.engine.note_table(container, key)
            if probe:
                process.put(container, key, held)

    def run(self, undo: list[process.Undo] | None) -> None:
        """Derive everything again from the live layers, which hold the new values.

        Args:
            undo: receives the steps back, to be run in reverse order.

        Raises:
            PatchError: what they derive does not fit the tensors in use, or is not derived a second time."""
        if not self._originals:
            return
        live = self._values()
        for place, (container, value) in self._set.items():
            process.put(container, place[1], value)
        self._called.clear()
        before = self._snapshot()
        self.phase = "commit"
        held = (*self._model.parameters(), *self._model.buffers(), *process.held_tensors(self._model))
        log = WriteLog(held if undo is not None else ())
        try:
            with log:
                for module in self._originals:
                    if module not in self._called:  # an outer one may have called it
                        getattr(module, NAME)()
        finally:
            for place, held in changes(before).items():
                if place not in self._set:  # not set at an earlier policy
                    self._set[place], live[place] = held, held[1]
            fresh = self._values()
            if undo is not None:
                undo.append(log.undo)
            for place, (container, _) in self._set.items():
                process.put(container, place[1], live[place])
        try:
            self._plan(live, fresh).apply(undo)
        except process.LayoutChanged as error:
            raise update_error(
                f"what {NAME} derives cannot take the place of the old: {error}.",
                "Open a new engine on them, or report this model.",
                type(self._model).__name__,
            ) from error

    def _replacement(self, module: torch.nn.Module) -> Callable[[], Any]:
        def process_weights_after_loading() -> Any:
            """Run the module's own hook at the first load and at a commit; within a bucket not at all."""
            self._called.add(module)
            if self.phase == "bucket":
                return None
            if self.phase == "commit":
                return self._originals[module]()
            before, modules = self._snapshot(), dict(self._model.named_modules())
            result = self._originals[module]()
            left = set(modules.values()).difference(self._model.modules())
            self.deleted |= {name for name, one in modules.items() if one in left and one._parameters}
            for place, held in changes(before).items():
                self._set.setdefault(place, held)
            return result

        return process_weights_after_loading

    def _values(self) -> dict[Place, Any]:
        return {place: process.get(container, place[1]) for place, (container, _) in self._set.items()}

    def _plan(self, live: dict[Place, Any], fresh: dict[Place, Any]) -> process.Plan:
        plan = process.Plan()
        for place, (container, before) in self._set.items():
            where = f"{type(container).__name__}.{place[1]}"
            value = fresh[place]
            if value is before and any(True for _ in process.tensors_below(live[place])):
                raise process.LayoutChanged(f"{where} is not derived a second time")
            if value is live[place]:
                continue
            if value is not before and live[place] is not process.ABSENT:
                value = plan.pair(live[place], value, where)
            plan.assign(process.table(container), place[1], value)
        return plan

    def _snapshot(self) -> process.Snapshot:
        return process.LayerState([], []).capture(list(self._model.modules()))
