"""Find what the post-processing of a layer has made or changed, by its Python state before and after."""

from __future__ import annotations

from typing import Any

import torch

from flashpatch.patches.fp8.refit import layer_state
from flashpatch.patches.fp8.refit.attributes import ABSENT, table
from flashpatch.patches.fp8.refit.fold import Plan
from flashpatch.patches.fp8.refit.layer_state import Snapshot


class InitialBuffers:
    """Buffers that a layer shows at their initial values while it is processed."""

    def __init__(self) -> None:
        self._writes: dict[int, int] = {}  # id of a buffer -> number of writes to it so far

    def add(self, buffer: torch.Tensor) -> torch.Tensor:
        """Note a buffer that is about to be shown; return it."""
        self._writes[id(buffer)] = 0 if buffer.is_inference() else buffer._version
        return buffer

    def unwritten(self, value: Any) -> bool:
        """Whether ``value`` is one of the buffers, and the post-processing did not write to it."""
        if (
            id(value) not in self._writes or value.is_inference()
        ):  # writes to inference tensors are not counted
            return False
        return self._writes[id(value)] == value._version


def compare(
    name: str,
    modules: list[torch.nn.Module],
    live: Snapshot,
    before: Snapshot,
    after: Snapshot,
    initial: InitialBuffers,
    kept_alive: list[torch.Tensor],
    plan: Plan,
) -> Plan:
    """Plan to bring into a live layer what post-processing has made of fresh values.

    Args:
        name: of the layer, for errors.
        modules: of the layer; they are in their live state again.
        live: their state in the running engine.
        before: their state with fresh values, before post-processing.
        after: the same after post-processing.
        initial: buffers that were shown at their initial values.
        kept_alive: when the plan is applied, its contents become the fresh tensors that a foreign resource may
            point into; hold them until the next update.
        plan: without steps yet.

    Raises:
        LayoutChanged: the values do not fit the storage in use.
    """

    def pair_into(
        container: Any, key_table: str, changed: dict, old: dict, fresh: dict, running: dict
    ) -> None:
        """Plan a container's attributes, or one of its tables: what has changed, and what is gone."""
        state = getattr(container, key_table) if key_table else table(container)
        where = name if container in modules else f"{name}:{type(container).__name__}"
        for key, value in changed.items():
            if running.get(key) is not None:
                value = plan.pair(running[key], value, f"{where}.{key}")
            elif value is None:
                continue
            else:
                plan.come_or_go(value, f"{where}.{key}")
            plan.assign(state, key, value)
        plan.derived.note(container, [k for k, v in fresh.items() if v is not old.get(k, ABSENT)], key_table)
        for key in running.keys() & (old.keys() | plan.known.keys(container, key_table)) - fresh.keys():
            plan.drop(state, key, f"{where}.{key}")

    for identity, (container, fresh) in after.contents.items():
        if identity not in before.contents or identity not in live.contents:
            continue  # made by the post-processing: reached through the attribute that holds it
        old, running = before.contents[identity][1], live.contents[identity][1]
        if isinstance(fresh, dict) and not (fresh or running):
            continue  # as most tables of hooks are
        own: frozenset[str] = frozenset()
        if isinstance(container, torch.nn.Module):
            own = layer_state.TABLES
            for one in ("_parameters", "_buffers", "_modules"):
                changed = {k: v for k, v in fresh[one].items() if v is not running[one].get(k)}
                changed = {k: v for k, v in changed.items() if not initial.unwritten(v)}
                pair_into(container, one, changed, old[one], fresh[one], running[one])
        if isinstance(fresh, dict):
            last = plan.known.keys(container)
            now = {k: v for k, v in fresh.items() if k not in own}
            changed = {k: v for k, v in now.items() if k in last or v is not old.get(k, ABSENT)}
            pair_into(container, "", changed, old, fresh, running)
            for key, value in fresh.items():
                if value is None and isinstance(running.get(key), float):
                    plan.assign(
                        table(container), key, None
                    )  # derived in a forward from what is old now: the next one does it again
        elif any(a is not b for a, b in zip(old, fresh)) or len(old) != len(fresh):
            plan.contents(container, running, fresh, name)
    fresh_tensors = _tensors(after)
    plan.fresh = frozenset(map(id, fresh_tensors))
    plan.replace(kept_alive, fresh_tensors if plan.owns_resources else [])
    return plan


def _tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    """The parameters and tensor attributes of a snapshot's modules."""
    found = []
    for container, contents in snapshot.contents.values():
        if isinstance(container, torch.nn.Module):
            found += [t for t in contents["_parameters"].values() if t is not None]
            found += [v for v in contents.values() if isinstance(v, torch.Tensor)]
    return found
