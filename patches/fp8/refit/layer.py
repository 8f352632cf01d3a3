"""One layer's part in an update: stage, load, process, fold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import layer_state
from flashpatch.patches.fp8.refit.fold import LayoutChanged, Plan
from flashpatch.patches.fp8.refit.layer_state import Captured, Ownership
from flashpatch.patches.fp8.refit.pristine_params import Slot, StorageSlot


class Layer:
    """The modules that must be processed together because they share tensors; mostly a single module.

    Args:
        modules: the modules, in the model's order.
        slots: Record1 of their tensors.
        deferred: processed after all other layers (attention-like layers that look at their neighbours).
    """

    def __init__(self, modules: list[torch.nn.Module], slots: list[Slot], deferred: bool) -> None:
        self.modules = modules
        self.slots = slots
        self.deferred = deferred
        self.opened_in = 0  # number of the load call that first wrote to it in this update
        self.processed_in = 0  # and of the one that completed it; 0: not yet
        self._held: list[tuple[torch.nn.Module, dict, dict]] = []
        self._born = Captured()
        self._keep: list[torch.Tensor] = []
        self._newborn: dict[int, int] = {}  # id of a buffer shown as it was at birth -> writes to it so far
        for slot in slots:
            slot.optional = deferred

    @property
    def name(self) -> str:
        return self.slots[0].name.rpartition(".")[0] if self.slots else type(self.modules[0]).__name__

    @property
    def complete(self) -> bool:
        return all(slot.complete for slot in self.slots)

    @property
    def touched(self) -> bool:
        return any(slot.touched for slot in self.slots)

    def missing(self) -> list[str]:
        return [name for slot in self.slots for name in slot.missing()]

    def remember_birth(self, ownership: Ownership) -> None:
        """Record1 of the Python state; tensors are dropped from it, the slots remember those."""
        self._born = ownership.capture(self.modules)
        for module in self.modules:
            contents = self._born.contents[id(module)][1]
            for table in (contents["_parameters"], contents["_buffers"]):
                table.update(dict.fromkeys(table))

    def reset(self) -> None:
        """Drop everything staged and start over."""
        self.forget()
        self.release()

    def forget(self) -> None:
        """Start over, in the middle of a load: the staged tensors are in the loader's hands and stay."""
        self.opened_in = self.processed_in = 0
        for slot in self.slots:
            slot.forget()

    def release(self) -> None:
        """Let go of the staged tensors; whoever still uses their memory keeps it.

        A loader in the middle of a call holds the tensors it was shown, and uses them no more.
        """
        shown: dict[StorageSlot, set[int]] = {}
        for slot in self.slots:
            if slot.tensor is not None:
                shown.setdefault(slot.storage, set()).add(id(slot.tensor))
        adopted = {id(tensor) for tensor in (*self._keep, *(slot.live() for slot in self.slots))}
        for storage, tensors in shown.items():
            if not tensors & adopted:
                storage.free(held_by=len(tensors))
        for slot in self.slots:
            slot.reset()

    def enter(self) -> None:
        """Show empty tensors to load into instead of the live ones."""
        self._held = [(m, m._parameters.copy(), m._buffers.copy()) for m in self.modules]
        for module in self.modules:
            module._parameters.clear()
            module._parameters.update(self._born.contents[id(module)][1]["_parameters"])
        self._show_staged()

    def check_staged(self) -> None:
        """Between `enter` and `leave`: the loader must have written to the tensors shown, not replaced them.

        Raises:
            PatchError: names a tensor that was; what was loaded into its place would be lost.
        """
        for slot in self.slots if self._held else ():
            shown = slot.tensor
            if shown is None or not self._is_staged(slot):
                continue
            if slot.live() is not shown or shown.untyped_storage()._cdata != slot.storage.get()._cdata:
                raise PatchError(
                    f"{slot.name} was replaced by the weight loader instead of written to",
                    patch="fp8.update",
                    advice="Report this model; until then update it by restarting the engine.",
                )

    def leave(self) -> None:
        """Show exactly what was there before `enter`; nothing if that has been done."""
        for module, parameters, buffers in self._held:
            for live, before in ((module._parameters, parameters), (module._buffers, buffers)):
                live.clear()
                live.update(before)
        self._held = []

    def prepare(self) -> None:
        """All that can be wrong with what was loaded is found here, before ranks go on together.

        Raises:
            PatchError: the values hold NaN or Inf, or were not written into the tensors shown.
        """
        self.check_staged()
        self.leave()
        for slot in self.slots:
            if self._is_staged(slot):
                slot.fill(slot.live())
        self._check_finite()

    def process(self, ownership: Ownership, processing: Callable[[torch.nn.Module], None]) -> Plan:
        """Post-process what was loaded and prepared, as at a first load, and plan its way into the live layer.

        The live layer is in place again when this returns. Nothing of it has changed yet, apart from tensors that
        the post-processing itself writes in place.

        Raises:
            PatchError: the values do not fit the storage in use.
        """
        live = ownership.capture(self.modules)
        try:
            self._restore_birth()
            before = ownership.capture(self.modules)
            for module in self.modules:
                processing(module)
            after = ownership.capture(self.modules)
        finally:
            live.restore()
        try:
            plan = self._plan(live, before, after)
        except LayoutChanged as error:
            raise PatchError(
                f"the new weights cannot take the place of the old ones: {error}.",
                patch="fp8.update",
                advice="Open a new engine on them, or report this layer.",
            ) from error
        self._keep_alive(plan, after)
        return plan

    def _is_staged(self, slot: Slot) -> bool:
        return not slot.is_buffer or slot.alias or (slot.expected is not None and slot.expected.covered > 0)

    def _show_staged(self) -> None:
        twins: dict[tuple, torch.Tensor] = {}
        for slot in self.slots:
            if self._is_staged(slot):
                identity = (id(slot.storage), slot.offset, slot.shape, slot.stride)
                slot.tensor = twins.setdefault(identity, slot.stage())
                table = slot.module._buffers if slot.is_buffer else slot.module._parameters
                table[slot.key] = slot.tensor

    def _restore_birth(self) -> None:
        """Put the modules back to how their constructor left them, with the loaded tensors in place."""
        buffers = [module._buffers.copy() for module in self.modules]
        self._born.restore()
        for module, live in zip(self.modules, buffers):
            for key, value in live.items():
                if key in module._buffers:
                    module._buffers[key] = value
        self._newborn = {}
        for slot in self.slots:
            if slot.is_buffer and slot.initial is not None and slot.key in slot.module._buffers:
                newborn = slot.module._buffers[slot.key] = slot.initial.clone()
                self._newborn[id(newborn)] = 0 if newborn.is_inference() else newborn._version
        self._show_staged()

    def _check_finite(self) -> None:
        for slot in self.slots:
            if slot.touched and not _finite(slot.stage()):
                raise PatchError(
                    f"{slot.name} holds NaN or Inf values",
                    patch="fp8.update",
                    advice="The update is abandoned: find where the trainer's weights diverged.",
                )

    def _plan(self, live: Captured, before: Captured, after: Captured) -> Plan:
        plan = Plan()
        for identity, (container, fresh) in after.contents.items():
            if identity not in before.contents or identity not in live.contents:
                continue  # made by the post-processing: reached through the attribute that holds it
            old, running = before.contents[identity][1], live.contents[identity][1]
            if isinstance(container, torch.nn.Module):
                for table in ("_parameters", "_buffers", "_modules"):
                    changed = {k: v for k, v in fresh[table].items() if v is not running[table].get(k)}
                    changed = {k: v for k, v in changed.items() if not self._as_at_birth(v)}
                    self._pair_into(plan, getattr(container, table), running[table], changed, container)
                old, running, fresh = (_attributes(contents) for contents in (old, running, fresh))
            if isinstance(fresh, dict):
                changed = {k: v for k, v in fresh.items() if k not in old or v is not old[k]}
                state = container if isinstance(container, dict) else vars(container)
                self._pair_into(plan, state, running, changed, container)
            elif any(a is not b for a, b in zip(old, fresh)) or len(old) != len(fresh):
                plan.contents(container, running, fresh, self.name)
        return plan

    def _as_at_birth(self, value: Any) -> bool:
        """Whether this is a buffer shown at its initial values that the post-processing did not write to."""
        if (
            id(value) not in self._newborn or value.is_inference()
        ):  # writes to inference tensors are not counted
            return False
        return self._newborn[id(value)] == value._version

    def _pair_into(
        self, plan: Plan, state: dict, running: dict, changed: dict[str, Any], container: Any
    ) -> None:
        where = self.name if container in self.modules else f"{self.name}:{type(container).__name__}"
        for key, value in changed.items():
            if key in running and running[key] is not None:
                value = plan.pair(running[key], value, f"{where}.{key}")
            elif value is None:
                continue
            plan.assign(state, key, value)

    def _keep_alive(self, plan: Plan, after: Captured) -> None:
        """Hold on to fresh tensors that a foreign resource may point into, until the next update."""
        fresh = []
        if plan.owns_resources:
            for container, contents in after.contents.values():
                if isinstance(container, torch.nn.Module):
                    fresh += [t for t in contents["_parameters"].values() if t is not None]
                    fresh += [v for v in contents.values() if isinstance(v, torch.Tensor)]
        plan.then(lambda: setattr(self, "_keep", fresh))


def _attributes(contents: dict) -> dict:
    return {key: value for key, value in contents.items() if key not in layer_state.TABLES}


def _finite(tensor: torch.Tensor) -> bool:
    """True when no element is NaN or infinite. One pass, no copy of the tensor."""
    data = tensor.detach()
    if not data.dtype.is_floating_point or data.numel() == 0:
        return True
    if data.dtype.itemsize == 1:
        return bool(torch.isfinite(data.to(torch.float32)).all())
    low, high = torch.aminmax(data)
    return bool(torch.isfinite(low) & torch.isfinite(high))
