"""Run a model's own post-processing once per update, and fold what it derives into the live model.

Some models derive state from several layers at once in a hook of their own, called by the engine after the first load
and by the model at the end of each ``load_weights``. It may derive only once (a guard), drop the parameters that it
read, or replace tensors that captured graphs read. So its first runs show what it sets; during an update it does
nothing until all layers are in place, then runs on attributes as they were before its first run, and what it makes is
copied into the tensors in use. A model that derives state in ``load_weights`` itself cannot be updated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from flashpatch.patches.fp8.refit import layer_state
from flashpatch.patches.fp8.refit.attributes import ABSENT, Attributes, Place, get, put, table, tensors_below
from flashpatch.patches.fp8.refit.errors import update_error
from flashpatch.patches.fp8.refit.fold import LayoutChanged, Plan, Undo
from flashpatch.patches.fp8.refit.write_tracker import WriteLog

NAME = "process_weights_after_loading"


class ModelHooks:
    """Stand in for the hooks of one model: ``process_weights_after_loading`` of the model and of modules in it.

    Args:
        model: the model, just constructed.
        deferred: whether the engine calls a module's method itself, as a layer's.

    Attributes:
        phase: what a call of a hook means now: part of the ``first`` load, of a ``bucket``, or of a ``commit``.
        deleted: names of modules with tensors that hooks have taken out of the model, so that none can be loaded.
    """

    def __init__(
        self, model: torch.nn.Module, deferred: Callable[[torch.nn.Module], bool] = lambda module: False
    ) -> None:
        self.phase: Literal["first", "bucket", "commit"] = "first"
        self.deleted: set[str] = set()
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
    def watch_load(self) -> Iterator[list[str]]:
        """Within, a call of ``load_weights``; afterwards the list has what it has set beside the parameters.

        Left out are layers that were post-processed meanwhile, as online quantization does, and what looks tensors up in the
        model's modules when it is asked, as SGLang 0.5.12's table of experts' weights does.
        """
        before, found = Attributes(self._model), []
        yield found
        changes = before.changes()
        tables = {identity for identity, _ in changes}
        processed = {
            id(container)
            for module in self._model.modules()
            if not tables.isdisjoint((id(module._parameters), id(module._buffers)))
            for held in layer_state.held_containers(module.modules())
            for container in (held, getattr(held, "_parameters", None), getattr(held, "_buffers", None))
        }
        modules = set(map(id, self._model.modules()))
        for place, (container, _) in changes.items():
            ours = place not in self._set and id(container) not in processed
            if ours and any(True for _ in tensors_below(get(container, place[1]), apart=modules)):
                found.append(f"{type(container).__name__}.{place[1]}")

    def run(self, undo: list[Undo] | None) -> None:
        """Derive everything again from the live layers, which hold the new values.

        Args:
            undo: receives the steps back, to be run in reverse order.

        Raises:
            PatchError: what they derive does not fit the tensors in use, or is not derived a second time.
        """
        if not self._originals:
            return
        live = self._values()
        for place, (container, value) in self._set.items():
            put(container, place[1], value)
        self._called.clear()
        before = Attributes(self._model)
        self.phase = "commit"
        log = WriteLog(_tensors(self._model) if undo is not None else ())
        try:
            with log:
                for module in self._originals:
                    if module not in self._called:  # an outer one may have called it
                        getattr(module, NAME)()
        finally:
            for place, held in before.changes().items():
                if place not in self._set:  # not set at an earlier policy
                    self._set[place], live[place] = held, held[1]
            fresh = self._values()
            if undo is not None:
                undo.append(log.undo)
            for place, (container, _) in self._set.items():
                put(container, place[1], live[place])
        try:
            self._plan(live, fresh).apply(undo)
        except LayoutChanged as error:
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
            before, modules = Attributes(self._model), dict(self._model.named_modules())
            result = self._originals[module]()
            left = set(modules.values()).difference(self._model.modules())
            self.deleted |= {name for name, one in modules.items() if one in left and one._parameters}
            for place, held in before.changes().items():
                self._set.setdefault(place, held)
            return result

        return process_weights_after_loading

    def _values(self) -> dict[Place, Any]:
        return {place: get(container, place[1]) for place, (container, _) in self._set.items()}

    def _plan(self, live: dict[Place, Any], fresh: dict[Place, Any]) -> Plan:
        plan = Plan()
        for place, (container, before) in self._set.items():
            where = f"{type(container).__name__}.{place[1]}"
            value = fresh[place]
            if value is before and any(True for _ in tensors_below(live[place])):
                raise LayoutChanged(f"{where} is not derived a second time")
            if value is live[place]:
                continue
            if value is not before and live[place] is not ABSENT:
                value = plan.pair(live[place], value, where)
            plan.assign(table(container), place[1], value)
        return plan


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), *layer_state.held_tensors(model)]
